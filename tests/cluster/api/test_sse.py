"""Streams to many readers, of whom some are slow, stop, or leave."""

import asyncio
import random
import re
import socket
import struct
from collections.abc import Callable, Iterator, Sequence

import pytest

from cluster.api.calls import Call
from cluster.api.openai.completion_answer import CompletionAnswer
from scheduler.arrays import int32
from scheduler.request import Abort, Finish, TokenBatch
from tests.cluster.api.conftest import StartRig
from tests.cluster.api.readings import WIDE, Reading, take_until_each_has, wide_files
from tests.cluster.api.rig import ApiRig
from tests.cluster.frontend.fake_engine import bytes_column, make_info, say_nothing, tokens

NUM_STREAMS = 256
LONG = {"max_tokens": 100_000}


def wide_language() -> dict[str, object]:
    """An engine's fields: it speaks a language with a very long word."""
    files = wide_files()
    return {"files": files, "info": make_info(files, max_model_len=1 << 20)}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiRig]:
    folder = tmp_path_factory.mktemp("rig")
    with ApiRig(folder, script=say_nothing, **wide_language()) as rig:  # type: ignore[arg-type]
        yield rig


def begin(rig: ApiRig, count: int, **fields: object) -> tuple[list[Reading], list[int]]:
    """So many streams, one after the other, and their handles."""
    readings: list[Reading] = []
    handles: list[int] = []
    for _ in range(count):
        readings.append(Reading(rig.url, **{**LONG, **fields}))  # type: ignore[arg-type]
        handles.append(rig.engine.next_request().handle)
    return readings, handles


def one_each(handles: Sequence[int], token_id: int, finish: Finish = Finish.NOT_YET) -> TokenBatch:
    """A step in which each of these gets one token."""
    return TokenBatch(
        handle=int32(handles),
        token=int32([token_id] * len(handles)),
        finish=bytes_column([int(finish)] * len(handles)),
    )


def ids_of(rig: ApiRig) -> tuple[int, int]:
    """A short token, and the wide one."""
    short = rig.tokenizer.token_id("a")
    wide = rig.tokenizer.token_id(WIDE)
    assert short is not None
    assert wide is not None
    return short, wide


def next_abort(rig: ApiRig) -> list[int]:
    message = rig.engine.received.get(timeout=30)
    assert isinstance(message, Abort), message
    return list(map(int, message.handle))


def num_tokens(call: Call) -> int:
    return sum(len(output.token_ids) for output in call.outputs)


def wait_on_loop(rig: ApiRig, condition: Callable[[], bool]) -> None:
    """Until something holds, asked where it cannot change meanwhile."""

    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.001)

    asyncio.run_coroutine_threadsafe(wait(), rig.loop).result(30)


def aborts_once_all_is_over(rig: ApiRig) -> list[int]:
    """The handles that the engine was told to abort. No call and no request may be left."""
    wait_on_loop(rig, lambda: not rig.api.calls)
    status = rig.api.engine.status(30.0)  # when it is answered, all that was sent before is there
    asyncio.run_coroutine_threadsafe(status, rig.loop).result(30)
    assert rig.api.engine.num_live == 0
    assert rig.engine.num_hellos == 1
    aborted: list[int] = []
    while not rig.engine.received.empty():
        aborted += next_abort(rig)
    return aborted


def test_readers_that_stop_are_cut_off_and_cost_nobody(start_rig: StartRig) -> None:
    """256 streams, 8 of which are not read: the engine's steps go on, every other reader has
    each token before the next one is made, and the 8 are aborted at the bound."""
    rig = start_rig(write_timeout_s=0.2, **wide_language())
    short, wide = ids_of(rig)
    readings, handles = begin(rig, NUM_STREAMS - 8)
    stopped, stopped_handles = begin(rig, 8, receive_buffer=4096)

    aborted: list[int] = []
    num_steps = 0
    while len(aborted) < len(stopped):
        num_steps += 1
        rig.engine.send(one_each(handles, short))
        for handle in set(stopped_handles) - set(aborted):
            rig.engine.send(tokens(handle, [wide] * 20))  # 40 kB
        take_until_each_has(readings, num_steps, b'"text":"a"')
        while not rig.engine.received.empty():
            aborted += next_abort(rig)
        assert num_steps < 10_000
    rig.engine.send(one_each(handles, short, Finish.LENGTH))
    for reading in [*readings, *stopped]:
        reading.take_all()

    assert sorted(aborted) == sorted(stopped_handles)
    assert {reading.text for reading in readings} == {"a" * (num_steps + 1)}
    assert {reading.events[-1] for reading in readings} == {"[DONE]"}
    # What a stopped reader was given is bounded by the buffers between, however much there was.
    assert all(len(reading.data) < 1_000_000 for reading in stopped)
    assert not any(reading.is_complete for reading in stopped)
    assert not aborts_once_all_is_over(rig)
    for reading in [*readings, *stopped]:
        reading.close()


def test_a_slow_reader_gets_everything_in_fewer_chunks(rig: ApiRig) -> None:
    """Chunks written at once, chunks that waited, and the last one: nothing is lost or swapped."""
    short, wide = ids_of(rig)
    (reading, other), (handle, other_handle) = begin(rig, 2, receive_buffer=4096)

    for _ in range(200):  # 800 kB
        rig.engine.send(tokens(handle, [wide, short, wide]))
        rig.engine.send(tokens(other_handle, [short]))
    wait_on_loop(rig, lambda: sum(map(num_tokens, rig.api.calls.values())) == 800)
    rig.engine.send(tokens(handle, [short], Finish.LENGTH))
    rig.engine.send(tokens(other_handle, [short], Finish.LENGTH))
    for each in (reading, other):
        each.take_all()

    assert reading.text == (WIDE + "a" + WIDE) * 200 + "a"
    assert other.text == "a" * 201
    assert len(reading.events) < 200
    assert reading.events[-1] == "[DONE]"
    assert not aborts_once_all_is_over(rig)
    reading.close()
    other.close()


def test_tokens_of_one_step_are_one_chunk_and_one_write(rig: ApiRig) -> None:
    short, _ = ids_of(rig)
    (reading,), (handle,) = begin(rig, 1)

    for count in range(1, 6):
        rig.engine.send(tokens(handle, [short] * count))
        take_until_each_has([reading], 1, b'"text":"%b"' % (b"a" * count))
    rig.engine.send(tokens(handle, [], Finish.LENGTH))
    reading.take_all()

    assert len(reading.events) == 5 + 2
    assert reading.text == "a" * 15
    reading.close()


def test_outputs_of_one_call_that_gain_a_token_in_one_step_leave_in_one_write(rig: ApiRig) -> None:
    short, _ = ids_of(rig)
    reading = Reading(rig.url, n=3, temperature=1, **LONG)
    handles = [rig.engine.next_request().handle for _ in range(3)]

    for count in range(1, 6):
        rig.engine.send(one_each(handles, short))
        take_until_each_has([reading], 3 * count, b'"text":"a"')
    rig.engine.send(one_each(handles, short, Finish.LENGTH))
    reading.take_all()

    assert reading.text == "a" * 18
    # An HTTP chunk begins with its size: the beginning, five steps, and the end.
    assert len(re.findall(rb"\r\n[0-9a-f]+\r\ndata: ", reading.data)) == 6
    assert not aborts_once_all_is_over(rig)
    reading.close()


@pytest.mark.parametrize("seed", range(2))
def test_clients_that_leave_at_any_moment_leave_nothing(rig: ApiRig, seed: int) -> None:
    """Before the first token, in the middle, with a reset, and after the end."""
    chance = random.Random(seed)
    short, wide = ids_of(rig)
    readings, handles = begin(rig, 40)
    live = dict(zip(handles, readings, strict=True))
    ended: set[int] = set()

    while live:
        for handle in chance.sample(sorted(live), k=min(4, len(live))):
            reading = live.pop(handle)
            if chance.random() < 0.3:  # it is over, or just about to be
                rig.engine.send(tokens(handle, [short], Finish.LENGTH))
                ended.add(handle)
            if chance.random() < 0.3:  # a reset instead of an orderly end
                linger = struct.pack("ii", 1, 0)
                reading.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            reading.close()
        if live:
            rig.engine.send(one_each(sorted(live), chance.choice([short, wide])))

    assert set(handles) - ended <= set(aborts_once_all_is_over(rig))


def test_who_pipelines_and_leaves_has_the_running_request_aborted(rig: ApiRig) -> None:
    (reading,), (handle,) = begin(rig, 1)
    body = b'{"prompt":"hi","stream":true}'
    reading.socket.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    rig.engine.send(tokens(handle, [ids_of(rig)[0]]))
    take_until_each_has([reading], 1, b'"text":"a"')

    reading.close()

    assert aborts_once_all_is_over(rig) == [handle]


def test_a_fault_of_ours_in_a_chunk_ends_its_stream_alone(
    rig: ApiRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    short, wide = ids_of(rig)
    (bad, good), (bad_handle, good_handle) = begin(rig, 2)
    growth = CompletionAnswer.growth

    def fail_on_wide(answer: CompletionAnswer) -> bytes:
        body = growth(answer)
        if WIDE.encode() in body:
            raise RuntimeError("a bug")
        return body

    monkeypatch.setattr(CompletionAnswer, "growth", fail_on_wide)
    rig.engine.send(one_each([bad_handle, good_handle], short))
    take_until_each_has([bad, good], 1, b'"text":"a"')
    rig.engine.send(tokens(bad_handle, [wide]))
    bad.take_all()
    rig.engine.send(tokens(good_handle, [short], Finish.LENGTH))
    good.take_all()

    assert aborts_once_all_is_over(rig) == [bad_handle]
    assert not bad.is_complete
    assert good.text == "aa"
    assert "a bug" in caplog.text
    bad.close()
    good.close()
