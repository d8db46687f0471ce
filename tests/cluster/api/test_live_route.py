"""`GET /live`: one subscription for all who watch, and nobody waits for a slow one."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import pytest

from cluster.api.step_audience import MAX_UNREAD, Viewer
from cluster.messages.reports import GroupLoad, StepNews, WatchSteps
from scheduler.arrays import int32
from tests.cluster.api.rig import ApiRig
from tests.cluster.frontend.fake_engine import say_nothing

NEWS = StepNews(
    uptime_s=12.5,
    num_waiting=1,
    groups=(GroupLoad(group=0, num_running=2, num_blocks=64),),
    group=int32([0, 0]),
    step=int32([7, 8]),
    age_s=np.asarray([0.125, 0.0], dtype=np.float32),
    decode_tokens=int32([2, 3]),
    first_token_s=np.asarray([0.25], dtype=np.float32),
)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[ApiRig]:
    with ApiRig(tmp_path, script=say_nothing) as rig:
        yield rig


class Stream:
    """The events of one connection to /live."""

    def __init__(self, stack: ExitStack, rig: ApiRig) -> None:
        self.response = stack.enter_context(rig.http.stream("GET", "/live"))
        self._lines = self.response.iter_lines()

    def next_of(self, event: str) -> dict[str, object]:
        """The data of the next event of this name; news are those without one."""
        name = ""
        for line in self._lines:
            field, _, value = line.partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                if name == event:
                    found: dict[str, object] = json.loads(value)
                    return found
                name = ""
        raise AssertionError("the stream has ended")


def told(rig: ApiRig) -> WatchSteps:
    message = rig.engine.received.get(timeout=10)
    assert isinstance(message, WatchSteps)
    return message


def test_a_viewer_is_told_that_the_engine_is_there_and_then_every_step(rig: ApiRig) -> None:
    with ExitStack() as stack:
        stream = Stream(stack, rig)
        pulse = stream.next_of("pulse")
        assert told(rig).enabled
        rig.engine.send(NEWS)
        news = stream.next_of("")

    assert stream.response.headers["content-type"].startswith("text/event-stream")
    assert pulse == {"ready": True, "news": ""}
    assert news == {
        "type": "step_news",
        "uptime_s": 12.5,
        "num_waiting": 1,
        "groups": [{"group": 0, "num_running": 2, "num_blocks": 64}],
        "group": [0, 0],
        "step": [7, 8],
        "age_s": [0.125, 0.0],
        "decode_tokens": [2, 3],
        "first_token_s": [0.25],
    }


def test_viewers_share_one_subscription_which_ends_with_the_last_of_them(rig: ApiRig) -> None:
    with ExitStack() as second:
        with ExitStack() as first:
            one, two = Stream(first, rig), Stream(second, rig)
            for stream in (one, two):
                stream.next_of("pulse")
            rig.engine.send(NEWS)
            assert one.next_of("") == two.next_of("")
            assert [told(rig).enabled, told(rig).enabled] == [True, True]  # the second: how is it?
        two.next_of("pulse")  # the other one has left, and nothing was said to the engine
        assert rig.engine.received.empty()
    assert not told(rig).enabled
    assert len(rig.api.audience) == 0


def test_a_viewer_is_told_that_the_engine_is_gone_and_watches_the_next_one(rig: ApiRig) -> None:
    with ExitStack() as stack:
        stream = Stream(stack, rig)
        assert told(rig).enabled
        rig.engine.send_bytes(b"what no engine says")  # the client hangs up, and dials again
        assert told(rig).enabled
        rig.engine.send(NEWS)
        assert stream.next_of("")["step"] == [7, 8]


def test_streams_end_when_the_process_is_asked_to_end(rig: ApiRig) -> None:
    with ExitStack() as stack:
        stream = Stream(stack, rig)
        stream.next_of("pulse")
        rig.api.leave()
        with pytest.raises(AssertionError, match="the stream has ended"):
            stream.next_of("nothing")


def test_a_slow_viewer_misses_the_oldest_news_and_no_more() -> None:
    async def read() -> list[bytes | None]:
        viewer = Viewer()
        for number in range(MAX_UNREAD + 5):
            viewer.put(b"%d" % number)
        return [await viewer.next(0.01) for _ in range(MAX_UNREAD + 1)]

    *kept, nothing = asyncio.run(read())

    assert kept == [b"%d" % number for number in range(5, MAX_UNREAD + 5)]
    assert nothing is None


def test_a_viewer_that_never_read_costs_nothing_when_it_leaves(rig: ApiRig) -> None:
    with rig.http.stream("GET", "/live"):
        assert told(rig).enabled
    assert not told(rig).enabled
    assert rig.http.get("/v1/models").status_code == httpx.codes.OK
