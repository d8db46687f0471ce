"""The life of a real server under a real model: statement 7, and case 112.

`tests/cluster/api/test_serving.py` tries the same with scripted workers in many more ways.
"""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from stoker import Client
from tests.cluster.api.streams import Stream, ports_of, streams, wait_until
from tests.system.api.serving import Serving
from tests.system.served import settled

pytestmark = [pytest.mark.model, pytest.mark.slow]

STORY = {"prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def serving(smollm2: Path, no_leaks: None) -> Iterator[Serving]:
    with Serving(smollm2, "--api-servers=2", "--health-timeout-s=1", "--drain-s=120") as serving:
        yield serving.wait_up()


def text_of(stream: Stream) -> str:
    return "".join(choice["text"] for event in stream.events for choice in event["choices"])  # type: ignore[attr-defined]


def test_a_server_is_frozen_loses_a_front_end_and_ends_without_losing_a_word(
    serving: Serving,
) -> None:
    with serving.http() as http, Client(serving.address) as client:
        expected = http.post("/v1/completions", json=STORY).json()["choices"][0]["text"]

        (stream,) = streams(serving, 1, **STORY)
        serving.engine.suspend()
        assert http.get("/health").status_code == 503
        serving.engine.resume()
        wait_until(lambda: http.get("/health").status_code == 200)
        assert text_of(stream.end()) == expected

        begun = streams(serving, 6, **STORY)
        victim, _ = serving.api_servers
        lost = len(ports_of(victim))
        victim.kill()
        ends = [stream.end() for stream in begun]
        assert sum(stream.is_done for stream in ends) >= len(ends) - lost
        assert all(text_of(stream) == expected for stream in ends if stream.is_done)
        settled(client)
        wait_until(lambda: len(serving.api_servers) == 2)
        wait_until(lambda: client.status().num_clients == 3)

    last = streams(serving, 4, **STORY)
    serving.ask_to_end()
    assert [text_of(stream.end()) for stream in last] == [expected] * 4
    assert all(stream.is_done for stream in last)
    assert serving.wait() == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{serving.base_url}/health")
