"""The asyncio client: the same answers, and a loop that never blocks."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from cluster.messages.sockets import ToClient
from scheduler.request import Abort, Finish, Rejection, Request
from stoker import AsyncClient, EngineLost, InvalidRequest, QueueFull, SamplingParams, WaitTimedOut
from tests.cluster.frontend.fake_engine import (
    ANSWER,
    FakeEngine,
    answer_at_once,
    ipc_address,
    say_nothing,
    tokens,
)

LONG = SamplingParams(max_tokens=40)

Scene = Callable[[FakeEngine, AsyncClient], Awaitable[None]]


def play(folder: Path, scene: Scene) -> None:
    """Run a scene with an engine and a client of it."""

    async def run(engine: FakeEngine) -> None:
        async with AsyncClient(engine.address, recovery_s=0.0) as client:
            await asyncio.wait_for(scene(engine, client), 30)

    with FakeEngine(ipc_address(folder), script=answer_at_once) as engine:
        asyncio.run(run(engine))


def test_generate_and_chat_answer_in_order(tmp_path: Path) -> None:
    async def scene(engine: FakeEngine, client: AsyncClient) -> None:
        outputs = await client.generate(["one", "two"], LONG)
        assert [output.prompt for output in outputs] == ["one", "two"]
        assert [output.outputs[0].text for output in outputs] == [ANSWER] * 2
        (answer,) = await client.chat([{"role": "user", "content": "hi"}], LONG)
        assert answer.outputs[0].text == ANSWER

    play(tmp_path, scene)


def test_a_handle_is_awaited_iterated_and_read(tmp_path: Path) -> None:
    async def scene(engine: FakeEngine, client: AsyncClient) -> None:
        handle = await client.submit("hi", LONG, request_id="mine")
        pieces = [piece async for piece in handle]
        assert "".join(piece.text for piece in pieces) == ANSWER
        assert pieces[-1].finish_reason == "length"
        output = await handle
        assert output == handle.snapshot()
        assert (handle.is_done, handle.request_id) == (True, "mine")

    play(tmp_path, scene)


def test_many_requests_are_in_flight_at_once(tmp_path: Path) -> None:
    async def scene(engine: FakeEngine, client: AsyncClient) -> None:
        handles = await asyncio.gather(*(client.submit("hi", LONG) for _ in range(50)))
        outputs = await asyncio.gather(*(handle.result() for handle in handles))
        assert [output.outputs[0].text for output in outputs] == [ANSWER] * 50

    play(tmp_path, scene)


def test_several_tasks_may_wait_for_one_request(tmp_path: Path) -> None:
    async def scene(engine: FakeEngine, client: AsyncClient) -> None:
        engine.script = say_nothing
        handle = await client.submit("hi", LONG)
        waiting = [asyncio.ensure_future(handle.result()) for _ in range(3)]
        request = await asyncio.to_thread(engine.next_request)
        engine.send(tokens(request.handle, [5], Finish.LENGTH))
        outputs = await asyncio.gather(*waiting)
        assert [output.outputs[0].token_ids for output in outputs] == [[5]] * 3

    play(tmp_path, scene)


def test_leaving_the_block_cancels_at_the_engine(tmp_path: Path) -> None:
    async def scene(engine: FakeEngine, client: AsyncClient) -> None:
        engine.script = say_nothing
        async with await client.submit("hi", LONG) as handle:
            request = await asyncio.to_thread(engine.next_request)
        message = await asyncio.to_thread(engine.received.get)
        assert isinstance(message, Abort)
        assert message.handle.tolist() == [request.handle]
        assert (await handle).outputs[0].finish_reason == "abort"

    play(tmp_path, scene)


def test_a_bounded_wait_leaves_the_request_running(tmp_path: Path) -> None:
    async def scene(engine: FakeEngine, client: AsyncClient) -> None:
        engine.script = say_nothing
        handle = await client.submit("hi", LONG)
        with pytest.raises(WaitTimedOut, match="goes on"):
            await handle.result(timeout_s=0.01)
        assert not handle.is_done

    play(tmp_path, scene)


def test_errors_are_the_same_named_ones(tmp_path: Path) -> None:
    async def scene(engine: FakeEngine, client: AsyncClient) -> None:
        with pytest.raises(InvalidRequest, match="empty"):
            await client.submit([])
        engine.script = lambda request: [
            Rejection(handle=request.handle, reason="queue_full", message="full")
        ]
        with pytest.raises(QueueFull):
            await (await client.submit("hi"))
        engine.script = say_nothing
        handle = await client.submit("hi")
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineLost):
            await handle
        with pytest.raises(EngineLost):
            async for _ in handle:
                pass

    play(tmp_path, scene)


def test_a_batch_larger_than_the_queue_is_answered_whole(tmp_path: Path) -> None:
    async def scene(engine: FakeEngine, client: AsyncClient) -> None:
        num_seen = 0

        def refuse_every_third(request: Request) -> list[ToClient]:
            nonlocal num_seen
            num_seen += 1
            if num_seen % 3:
                return answer_at_once(request)
            return [Rejection(handle=request.handle, reason="queue_full", message="full")]

        engine.script = refuse_every_third
        prompts = [f"prompt {i}" for i in range(20)]
        outputs = await client.generate(prompts, LONG)
        assert [output.prompt for output in outputs] == prompts

    play(tmp_path, scene)


def test_a_cancelled_batch_cancels_its_requests(tmp_path: Path) -> None:
    async def scene(engine: FakeEngine, client: AsyncClient) -> None:
        engine.script = say_nothing
        task = asyncio.ensure_future(client.generate(["a", "b"], LONG))
        handles = [(await asyncio.to_thread(engine.next_request)).handle for _ in range(2)]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        aborted: list[int] = []
        while len(aborted) < 2:
            message = await asyncio.to_thread(engine.received.get)
            assert isinstance(message, Abort)
            aborted += message.handle.tolist()
        assert sorted(aborted) == sorted(handles)

    play(tmp_path, scene)


def test_waiting_for_an_absent_engine_does_not_hold_up_the_loop(tmp_path: Path) -> None:
    async def run() -> None:
        async with AsyncClient(ipc_address(tmp_path), connect_timeout_s=20.0) as client:
            task = asyncio.ensure_future(client.info())
            ticks = 0
            for _ in range(100):
                await asyncio.sleep(0)
                ticks += 1
            assert ticks == 100
            assert not task.done()
            engine = await asyncio.to_thread(FakeEngine, ipc_address(tmp_path))
            assert await task == engine.info
            await asyncio.to_thread(engine.close)

    asyncio.run(run())
