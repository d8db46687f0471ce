"""Streams with keys over real front ends, of which some die."""

import json
import threading
from collections.abc import Iterator

import httpx
import pytest

from examples.resume import ResumingTransport
from stoker import Client
from tests.cluster.api.streams import WAIT_S, wait_until
from tests.cluster.api.test_serving import Starter
from tests.cluster.scripted import tokens_after
from tests.system.api.serving import HEADERS, Serving
from tests.system.served import settled

NUM_TOKENS = 200


@pytest.fixture
def serving() -> Iterator[Serving]:
    """Two front ends before a scripted model, slow enough to be in the middle of something."""
    start = Starter()
    yield start("--api-servers=2", script={"step_s": 0.01}).wait_up()
    start.clear()


class Patient(threading.Thread):
    """One stream, read to its end whatever happens."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._http = httpx.Client(
            base_url=url, headers=HEADERS, timeout=WAIT_S, transport=ResumingTransport()
        )
        self.token_ids: list[int] = []
        self.num_done = 0
        self.has_begun = threading.Event()
        self.start()

    def run(self) -> None:
        body = {
            "prompt": [5, 6, 7],
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        with self._http, self._http.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    self.num_done += 1
                elif line.startswith("data: "):
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    self.token_ids += choice["token_ids"]
                    self.has_begun.set()


@pytest.mark.slow
def test_streams_with_keys_go_on_when_their_front_end_is_killed(serving: Serving) -> None:
    """Both die, one after the other; each token comes once."""
    patients = [Patient(serving.base_url) for _ in range(16)]
    for patient in patients:
        assert patient.has_begun.wait(WAIT_S)
    for _ in range(2):
        victim = serving.api_servers[0]
        victim.kill()
        wait_until(lambda victim=victim: victim not in serving.api_servers)
        wait_until(lambda: len(serving.api_servers) == 2)
    for patient in patients:
        patient.join(WAIT_S)

    assert [patient.num_done for patient in patients] == [1] * 16
    for patient in patients:
        assert patient.token_ids == tokens_after(3, NUM_TOKENS)
    with Client(serving.address) as client:
        settled(client)
