"""Ids in each answer, and one line in the log for each call."""

import logging
import queue
import re
from collections.abc import Iterator

import pytest

from tests.cluster.api.conftest import StartRig
from tests.cluster.api.rig import ApiRig
from tests.cluster.frontend.fake_engine import answer_at_once


class Log(logging.Handler):
    """The lines about calls, which are written after their answers were sent."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._found: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()

    def emit(self, record: logging.LogRecord) -> None:
        event, _, rest = record.getMessage().partition(" ")
        if event == "request":
            fields = dict(re.findall(r'(\w+)=("[^"]*"|\S+)', rest))
            self._found.put({"level": record.levelname, **fields})

    def next(self) -> dict[str, str]:
        return self._found.get(timeout=20)


@pytest.fixture
def log() -> Iterator[Log]:
    log, logger = Log(), logging.getLogger("stoker.api")
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    yield log
    logger.removeHandler(log)
    logger.setLevel(logging.NOTSET)


@pytest.fixture
def rig(start_rig: StartRig) -> Iterator[ApiRig]:
    return start_rig(script=answer_at_once)


def test_the_callers_id_is_echoed_and_ours_is_made_where_there_is_none(rig: ApiRig) -> None:
    echoed = rig.http.get("/v1/models", headers={"X-Request-Id": "mine-1"})
    made = [rig.http.get(path).headers["x-request-id"] for path in ("/v1/models", "/no", "/health")]

    assert echoed.headers["x-request-id"] == "mine-1"
    assert all(re.fullmatch(r"req-[0-9a-f]{24}", each) for each in made)
    assert len(set(made)) == 3


@pytest.mark.parametrize("bad", ["", "two words", "x" * 129, "tab\there", "é"])
def test_an_id_that_would_spoil_the_log_is_not_taken_over(rig: ApiRig, bad: str) -> None:
    headers = [(b"x-request-id", bad.encode("latin-1"))]
    made = rig.http.get("/v1/models", headers=headers).headers["x-request-id"]
    assert re.fullmatch(r"req-[0-9a-f]{24}", made)


def test_a_call_has_one_line_with_the_figures_that_matter(rig: ApiRig, log: Log) -> None:
    answer = rig.http.post(
        "/v1/completions",
        json={"prompt": [5, 6, 7], "max_tokens": 4},
        headers={"X-Request-Id": "mine-2"},
    )
    line = log.next()

    assert line["id"] == "mine-2"
    assert line["call"] == answer.json()["id"]
    assert (line["level"], line["model"]) == ("INFO", "tiny")
    assert (line["method"], line["route"]) == ("POST", "/v1/completions")
    assert (line["status"], line["finish"]) == ("200", "length")
    assert (line["prompt_tokens"], line["cached_tokens"], line["output_tokens"]) == ("3", "2", "4")
    assert 0 <= float(line["ttft_s"]) <= float(line["seconds"])
    assert float(line["queue_s"]) >= 0
    assert line["client"] == "127.0.0.1"


@pytest.mark.parametrize("stream", [False, True])
def test_every_output_of_a_call_is_counted(rig: ApiRig, log: Log, stream: bool) -> None:
    rig.post(
        "/v1/completions", prompt=[[5], [6, 7]], max_tokens=4, n=2, stream=stream, temperature=1
    )
    line = log.next()
    assert (line["prompt_tokens"], line["output_tokens"]) == ("3", "16")


def test_what_was_refused_has_a_line_too(rig: ApiRig, log: Log) -> None:
    rig.post("/v1/completions", prompt=[])
    rig.post("/no/such/route")
    rig.http.get("/no/such/route")
    lines = [log.next() for _ in range(3)]

    assert [line["status"] for line in lines] == ["400", "404", "404"]
    assert [line["route"] for line in lines] == [
        "/v1/completions",
        "/no/such/route",
        "/no/such/route",
    ]
    assert all("call" not in line for line in lines)


def test_probes_that_find_all_well_say_nothing(rig: ApiRig, log: Log) -> None:
    for path in ("/health", "/v1/models", "/version"):
        assert rig.http.get(path).status_code == 200
    rig.http.get("/no/such/route")
    assert log.next()["route"] == "/no/such/route"
