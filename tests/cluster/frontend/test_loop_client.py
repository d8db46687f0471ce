"""One connection owned by a loop: the same answers as for threads, and nothing ever blocks."""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from cluster.errors import AddressError
from cluster.frontend import loop_link
from cluster.frontend.draft import Draft, RequestOptions, draft_of
from cluster.frontend.engine_client import ClientConfig
from cluster.frontend.errors import (
    ClientClosed,
    EngineLost,
    EngineUnreachable,
    ProtocolMismatch,
)
from cluster.frontend.loop_client import LoopClient
from cluster.frontend.requests import LiveRequest
from cluster.frontend.tokenizer import Tokenizer
from cluster.keys import write_key_file
from cluster.links.sockets import fresh_keys
from cluster.messages.clients import EngineStarting, Refusal, TokenizerRequest
from cluster.messages.reports import Status, StatusRequest
from cluster.messages.sockets import ToClient
from scheduler.arrays import int32
from scheduler.errors import InvalidRequest
from scheduler.request import Abort, Finish, Rejection, Request, TokenBatch
from scheduler.sampling import SamplingParams
from tests.cluster.frontend.fake_engine import (
    ANSWER,
    FakeEngine,
    answer_at_once,
    bytes_column,
    ipc_address,
    make_info,
    say_nothing,
    tokens,
)

LONG = SamplingParams(max_tokens=40)

T = TypeVar("T")
Scene = Callable[[FakeEngine, LoopClient], Awaitable[None]]


def make_client(address: str, **fields: object) -> LoopClient:
    values = {"address": address, "shortest_redial_s": 0.01, "recovery_s": 0.0, **fields}
    return LoopClient(ClientConfig(**values))  # type: ignore[arg-type]


def play(scene: Scene, folder: Path, **engine_fields: object) -> None:
    """Run a scene with a client that has dialled a fake engine."""

    async def run() -> None:
        client = make_client(engine.address)
        client.start()
        try:
            async with asyncio.timeout(30):
                await scene(engine, client)
        finally:
            await client.close()

    with FakeEngine(ipc_address(folder), **engine_fields) as engine:  # type: ignore[arg-type]
        asyncio.run(run())


async def make_draft(client: LoopClient, sampling: SamplingParams = LONG) -> Draft:
    info, files = await client.wait_ready(10.0), await client.tokenizer_files()
    assert files is not None
    return draft_of(
        "hi",
        sampling,
        RequestOptions(),
        info=info,
        tokenizer=Tokenizer(files),
        seed=client.draw_seed(),
        request_id="request-0",
    )


async def start(client: LoopClient, sampling: SamplingParams = LONG) -> LiveRequest:
    return client.submit(await make_draft(client, sampling))


async def wait(live: LiveRequest) -> None:
    """Until a request is done."""
    changed = asyncio.Event()
    live.watchers.append(lambda _: changed.set())
    while not live.is_done:
        await changed.wait()
        changed.clear()


async def from_thread(call: Callable[[], T]) -> T:
    return await asyncio.to_thread(call)


def test_a_request_is_answered_and_its_watcher_told_once_per_batch(tmp_path: Path) -> None:
    async def scene(engine: FakeEngine, client: LoopClient) -> None:
        counts: list[int] = []
        draft = await make_draft(client)
        live = client.submit(draft, lambda live: counts.append(len(live.outputs[0].token_ids)))
        request = await from_thread(engine.next_request)
        assert draft.tokenizer is not None
        ids = draft.tokenizer.encode(ANSWER, add_special_tokens=False)

        engine.send(tokens(request.handle, ids[:2]))
        engine.send(tokens(request.handle, ids[2:], Finish.LENGTH))
        await wait(live)

        assert live.failure is None
        assert live.outputs[0].text == ANSWER
        assert counts == [2, len(ids)]

    play(scene, tmp_path)


def test_a_flood_of_batches_is_taken_in_whole_and_others_have_their_turn(tmp_path: Path) -> None:
    count = 500

    async def scene(engine: FakeEngine, client: LoopClient) -> None:
        live = await start(client, SamplingParams(max_tokens=count))
        handle = (await from_thread(engine.next_request)).handle
        num_turns = 0

        async def others() -> None:
            nonlocal num_turns
            while not live.is_done:
                await asyncio.sleep(0)
                num_turns += bool(live.outputs[0].token_ids)

        for _ in range(count - 1):
            engine.send(tokens(handle, [5]))
        engine.send(tokens(handle, [5], Finish.LENGTH))
        await asyncio.gather(others(), wait(live))

        assert live.outputs[0].token_ids == [5] * count
        assert num_turns >= count // 32

    play(scene, tmp_path, info=make_info(max_model_len=1000))


def test_news_that_come_while_much_is_sent_are_not_overlooked(tmp_path: Path) -> None:
    async def scene(engine: FakeEngine, client: LoopClient) -> None:
        draft = await make_draft(client)
        for _ in range(10):
            lives = [client.submit(draft) for _ in range(20)]
            await asyncio.gather(*map(wait, lives))
            assert {live.outputs[0].text for live in lives} == {ANSWER}
        assert client.num_live == 0

    play(scene, tmp_path, script=answer_at_once)


def test_more_messages_than_the_queue_holds_leave_when_there_is_room(tmp_path: Path) -> None:
    count = 3000
    handles: list[int] = []

    def answer(request: Request) -> list[ToClient]:
        """One message for all: more of them than the queue of answers holds would be lost."""
        handles.append(request.handle)
        if len(handles) < count:
            return []
        ends = bytes_column([int(Finish.LENGTH)] * count)
        return [TokenBatch(handle=int32(handles), token=int32([5] * count), finish=ends)]

    async def scene(engine: FakeEngine, client: LoopClient) -> None:
        draft = await make_draft(client, SamplingParams(max_tokens=1))
        lives = [client.submit(draft) for _ in range(count)]
        await asyncio.gather(*map(wait, lives))
        assert [live.failure for live in lives] == [None] * count

    play(scene, tmp_path, script=answer)


def test_an_engine_that_reads_nothing_counts_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once all queues between are full, what is left to send waits for a bounded time."""
    monkeypatch.setattr(loop_link, "SEND_TIMEOUT_S", 0.05)
    may_go_on = threading.Event()

    def freeze(request: Request) -> list[ToClient]:
        assert may_go_on.wait(30)
        return []

    async def scene(engine: FakeEngine, client: LoopClient) -> None:
        draft = await make_draft(client, SamplingParams(max_tokens=1))
        lives = [client.submit(draft) for _ in range(8000)]
        await wait(lives[-1])
        engine.script = answer_at_once
        may_go_on.set()
        again = await start(client)
        await wait(again)

        assert all(isinstance(live.failure, EngineLost) for live in lives)
        assert "has not taken a message for 0.05 s" in str(lives[0].failure)
        assert again.failure is None

    play(scene, tmp_path, script=freeze)


def test_the_tokenizer_comes_over_the_wire_once(tmp_path: Path) -> None:
    async def scene(engine: FakeEngine, client: LoopClient) -> None:
        first, second = await asyncio.gather(client.tokenizer_files(), client.tokenizer_files())
        assert first == engine.files
        assert first is second is await client.tokenizer_files()

    play(scene, tmp_path)


def test_a_model_without_a_tokenizer_has_no_files(tmp_path: Path) -> None:
    async def scene(engine: FakeEngine, client: LoopClient) -> None:
        assert await client.tokenizer_files() is None

    play(scene, tmp_path, info=make_info(tokenizer_digest=""))


def test_an_engine_may_appear_after_the_client(tmp_path: Path) -> None:
    address = ipc_address(tmp_path)

    async def run() -> None:
        client = make_client(address)
        client.start()
        assert client.info is None
        with pytest.raises(EngineUnreachable, match=r"no engine answers at ipc.*0\.05 s"):
            await client.wait_ready(0.05)
        with FakeEngine(address, script=answer_at_once):
            live = await start(client)
            await wait(live)
            await client.close()
        assert live.outputs[0].text == ANSWER

    asyncio.run(run())


def test_an_engine_that_still_starts_is_named_and_nothing_is_sent_to_it(tmp_path: Path) -> None:
    async def scene(engine: FakeEngine, client: LoopClient) -> None:
        assert await client.status(10.0) == engine.status
        assert client.news == "loading weights"
        with pytest.raises(EngineUnreachable, match="not ready: loading weights"):
            await client.wait_ready(0.01)
        with pytest.raises(EngineUnreachable, match="not ready: loading weights"):
            client.tell(Abort(tokens(1).handle))
        engine.send(engine.info)
        assert await client.wait_ready(10.0) == engine.info == client.info
        assert client.news == ""

    play(scene, tmp_path, hello_answer=EngineStarting(message="loading weights"))


def test_a_lost_engine_fails_what_is_live_and_the_next_one_serves(tmp_path: Path) -> None:
    address = ipc_address(tmp_path)

    async def run() -> None:
        client = make_client(address)
        client.start()
        with FakeEngine(address) as engine:
            draft = await make_draft(client)
            live = client.submit(draft)
            await from_thread(engine.next_request)
            await from_thread(engine.close)
        await wait(live)
        assert isinstance(live.failure, EngineLost)
        assert address in str(live.failure)
        with pytest.raises(EngineUnreachable, match="last connection ended"):
            client.submit(draft)
        with FakeEngine(address, script=answer_at_once):
            again = await start(client)
            await wait(again)
            await client.close()
        assert again.failure is None
        assert again.outputs[0].text == ANSWER

    asyncio.run(run())


@pytest.mark.parametrize("frame", [b"", b"\x00garbage", b"\x81\xa4type\xa6tokens"])
def test_garbage_from_the_engine_ends_the_connection_not_the_client(
    tmp_path: Path, frame: bytes
) -> None:
    async def scene(engine: FakeEngine, client: LoopClient) -> None:
        live = await start(client)
        await from_thread(engine.next_request)
        engine.send_bytes(frame)
        await wait(live)
        engine.script = answer_at_once
        again = await start(client)
        await wait(again)

        assert isinstance(live.failure, EngineLost)
        assert again.failure is None
        assert engine.num_hellos == 2

    play(scene, tmp_path)


def test_a_watcher_that_raises_costs_the_connection_not_the_loop(tmp_path: Path) -> None:
    async def scene(engine: FakeEngine, client: LoopClient) -> None:
        def raise_once(_: LiveRequest) -> None:
            live.watchers.clear()
            raise RuntimeError("a bug")

        draft = await make_draft(client)
        engine.script = answer_at_once
        live = client.submit(draft, raise_once)
        while not live.is_done:
            await asyncio.sleep(0.001)
        again = await start(client)
        await wait(again)

        assert isinstance(live.failure, EngineLost)
        assert "a bug" in str(live.failure)
        assert again.outputs[0].text == ANSWER

    play(scene, tmp_path)


def test_another_protocol_is_final(tmp_path: Path) -> None:
    async def scene(engine: FakeEngine, client: LoopClient) -> None:
        for call in (client.wait_ready(10.0), client.tokenizer_files(), client.status(10.0)):
            with pytest.raises(ProtocolMismatch, match="speak 7"):
                await call

    play(scene, tmp_path, hello_answer=Refusal(reason="protocol", message="speak 7"))


def test_an_impossible_address_is_refused_at_once() -> None:
    with pytest.raises(AddressError):
        make_client("http://x:1")


def test_cancelling_reaches_the_engine(tmp_path: Path) -> None:
    async def scene(engine: FakeEngine, client: LoopClient) -> None:
        live = await start(client)
        request = await from_thread(engine.next_request)

        client.cancel(live)
        client.cancel(live)

        message = await from_thread(lambda: engine.received.get(timeout=10))
        assert isinstance(message, Abort)
        assert message.handle.tolist() == [request.handle]
        assert live.outputs[0].finish is Finish.ABORT
        await client.status(10.0)
        assert engine.received.empty()

    play(scene, tmp_path)


def test_a_rejection_of_one_leaves_the_others_alone(tmp_path: Path) -> None:
    async def scene(engine: FakeEngine, client: LoopClient) -> None:
        one, two = await start(client), await start(client)
        first = await from_thread(engine.next_request)
        second = await from_thread(engine.next_request)

        engine.send(Rejection(handle=first.handle, reason="too_long", message="300 of 192 tokens"))
        engine.send(tokens(second.handle, [5], Finish.LENGTH))
        await asyncio.gather(wait(one), wait(two))

        assert isinstance(one.failure, InvalidRequest)
        assert two.failure is None

    play(scene, tmp_path)


def test_a_request_that_is_too_large_for_a_message_is_refused_before_it_leaves(
    tmp_path: Path,
) -> None:
    async def scene(engine: FakeEngine, client: LoopClient) -> None:
        info = await client.wait_ready(10.0)
        draft = draft_of(
            [1] * 4_200_000,
            LONG,
            RequestOptions(),
            info=info,
            tokenizer=None,
            seed=1,
            request_id="long",
        )
        with pytest.raises(InvalidRequest, match="bytes per message"):
            client.submit(draft)
        assert client.num_live == 0

    play(scene, tmp_path, info=make_info(max_model_len=10_000_000))


def test_those_who_ask_the_same_meanwhile_share_one_question(tmp_path: Path) -> None:
    async def scene(engine: FakeEngine, client: LoopClient) -> None:
        await client.wait_ready(10.0)
        answers = await asyncio.gather(*(client.status(10.0) for _ in range(20)))
        assert answers == [engine.status] * 20
        assert engine.num_status_requests == 1
        await client.status(10.0)
        assert engine.num_status_requests == 2

    play(scene, tmp_path)


def test_a_question_without_an_answer_ends_in_time_and_a_late_answer_serves_the_next(
    tmp_path: Path,
) -> None:
    async def scene(engine: FakeEngine, client: LoopClient) -> None:
        await client.wait_ready(10.0)
        engine.answers_status = False
        for _ in range(3):
            with pytest.raises(EngineUnreachable):
                await client.status(0.01)
        engine.answers_status = True
        engine.send(engine.status)
        later = msgspec.structs.replace(engine.status, uptime_s=2.0)
        while await client.status(10.0) != later:
            engine.status = later
        assert engine.num_status_requests <= 3

    play(scene, tmp_path)


def test_a_question_is_failed_by_the_end_of_the_connection(tmp_path: Path) -> None:
    async def scene(engine: FakeEngine, client: LoopClient) -> None:
        await client.wait_ready(10.0)
        asked = asyncio.ensure_future(client.ask(TokenizerRequest(), Status, 10.0))
        await asyncio.sleep(0)
        engine.send_bytes(b"garbage")
        with pytest.raises(EngineLost):
            await asked

    play(scene, tmp_path)


def test_listeners_hear_what_nobody_asked_for_also_after_a_redial(tmp_path: Path) -> None:
    async def scene(engine: FakeEngine, client: LoopClient) -> None:
        heard: asyncio.Queue[Status] = asyncio.Queue()
        ends = [
            client.subscribe(
                Status, heard.put_nowait, opening=StatusRequest(), closing=TokenizerRequest()
            )
            for _ in range(2)
        ]
        for _ in ends:  # the first listener's opening was answered, to both of them
            assert await heard.get() == engine.status
        engine.send_bytes(b"garbage")
        for _ in ends:
            assert await heard.get() == engine.status
        ends[0]()
        ends[0]()
        await client.wait_ready(10.0)
        engine.send(engine.status)
        await heard.get()
        ends[1]()
        engine.send(engine.status)
        await client.ask(StatusRequest(), Status, 10.0)
        assert heard.empty()
        assert engine.num_status_requests >= 2

    play(scene, tmp_path)


def test_closing_aborts_what_is_live_and_leaves_no_descriptor(tmp_path: Path) -> None:
    async def scene(engine: FakeEngine, client: LoopClient) -> None:
        lives = [await start(client) for _ in range(3)]
        handles = [(await from_thread(engine.next_request)).handle for _ in lives]

        await client.close()

        message = await from_thread(lambda: engine.received.get(timeout=10))
        assert isinstance(message, Abort)
        assert message.handle.tolist() == handles
        assert all(isinstance(live.failure, ClientClosed) for live in lives)
        with pytest.raises(ClientClosed):
            await client.wait_ready()
        await client.close()

    num_before = len(os.listdir("/proc/self/fd"))
    play(scene, tmp_path)
    assert len(os.listdir("/proc/self/fd")) <= num_before


def test_closing_without_an_engine_does_not_wait(tmp_path: Path) -> None:
    async def run() -> None:
        client = make_client(ipc_address(tmp_path), close_timeout_s=60.0)
        client.start()
        async with asyncio.timeout(10):
            await client.close()

    asyncio.run(run())


def test_an_encrypted_engine_answers_holders_of_its_key_file(tmp_path: Path) -> None:
    keys, other = fresh_keys(), fresh_keys()
    write_key_file(tmp_path / "key", keys.client)
    write_key_file(tmp_path / "other", other.client)

    async def run() -> None:
        client = make_client(engine.address, key_file=str(tmp_path / "key"))
        client.start()
        live = await start(client)
        await wait(live)
        await client.close()
        assert live.outputs[0].text == ANSWER
        for name, why in {"other": "hangs up in the handshake", "missing": "cannot read"}.items():
            client = make_client(engine.address, key_file=str(tmp_path / name))
            client.start()
            with pytest.raises(EngineUnreachable, match=f"{why}.*/{name}"):
                await client.wait_ready(0.5)
            await client.close()

    with FakeEngine("tcp://127.0.0.1:0", script=answer_at_once, keys=keys.server) as engine:
        asyncio.run(run())


def test_a_silent_engine_costs_no_cpu_turns(tmp_path: Path) -> None:
    """The descriptors tell of changes: once all is taken, the loop sleeps."""

    async def scene(engine: FakeEngine, client: LoopClient) -> None:
        live = await start(client)
        await from_thread(engine.next_request)
        turns = 0
        link = client._link
        assert link._link is not None
        turn = link._turn

        def count() -> None:
            nonlocal turns
            turns += 1
            turn()

        link._turn = count  # type: ignore[method-assign]
        for fd in link._link.fds:
            asyncio.get_running_loop().add_reader(fd, count)  # instead of the reader before
        await asyncio.sleep(0.2)
        assert turns <= 10
        assert not live.is_done

    play(scene, tmp_path, script=say_nothing)
