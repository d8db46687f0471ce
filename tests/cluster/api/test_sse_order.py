"""Who writes a chunk when: the stream's task, or the callback for all streams."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import cast

from starlette.types import Message

from cluster.api.calls import Call, submit_all
from cluster.api.errors import ApiError
from cluster.api.sse import CONNECTION, Connection, Deliveries, EventStream
from cluster.frontend.draft import Draft, RequestOptions, draft_of
from cluster.frontend.loop_client import LoopClient
from cluster.frontend.requests import LiveRequest
from cluster.frontend.session import FrontSession
from cluster.frontend.tokenizer import Tokenizer
from cluster.http_config import HttpConfig
from cluster.wire import PROTOCOL_VERSION
from scheduler.request import Finish
from scheduler.sampling import SamplingParams
from tests.cluster.frontend.fake_engine import make_info, tokens
from tests.cluster.frontend.tiny_tokenizers import llama3_like


class LocalEngine:
    """A session without a socket."""

    news = ""

    def __init__(self) -> None:
        self.session = FrontSession(PROTOCOL_VERSION)
        self.tokenizer = Tokenizer(llama3_like())
        self.session.receive(make_info(), 0.0)

    def submit(self, draft: Draft) -> LiveRequest:
        live, _ = self.session.submit(draft, 0.0)
        return live

    def cancel(self, live: LiveRequest) -> None:
        self.session.cancel(live)

    def draft(self) -> Draft:
        return draft_of(
            "hi",
            SamplingParams(max_tokens=50),
            RequestOptions(),
            info=make_info(),
            tokenizer=self.tokenizer,
            seed=1,
            request_id="call",
        )


class Texts:
    """Chunks that are the text alone."""

    def __init__(self, call: Call) -> None:
        self._output = call.outputs[0]
        self._num_read = 0

    def growth(self) -> bytes:
        new = self._output.texts[self._num_read :]
        self._num_read = len(self._output.texts)
        return "".join(new).encode()

    def closing(self) -> bytes:
        return b"."

    def failing(self, error: ApiError) -> bytes:
        return b"!"


class FakeConnection(Connection):
    """Notes what is written at once."""

    def __init__(self, out: list[str]) -> None:
        self.out = out
        self.has_room = True
        self.num_aborts = 0

    @property
    def is_free(self) -> bool:
        return self.has_room

    @property
    def unsent_bytes(self) -> int:
        return 1000

    def write(self, body: bytes) -> None:
        assert self.has_room
        self.out.append(f"at once {body.decode()}")

    def abort(self) -> None:
        self.num_aborts += 1


class Scene:
    """One stream. `out` is what reached the reader, and by whom."""

    def __init__(self, *, write_timeout_s: float = 30.0) -> None:
        self.out: list[str] = []
        self.engine = LocalEngine()
        engine = cast(LoopClient, self.engine)
        requests = submit_all(engine, [self.engine.draft()])
        self.call = Call("call", engine, requests, lambda _: None)
        self.connection = FakeConnection(self.out)
        self.may_send = asyncio.Event()
        self.may_send.set()
        server = SimpleNamespace(
            config=HttpConfig(write_timeout_s=write_timeout_s), deliveries=Deliveries()
        )
        scope = {
            "type": "http",
            "app": SimpleNamespace(state=SimpleNamespace(server=server)),
            "extensions": {CONNECTION: self.connection},
        }
        stream = EventStream(self.call, Texts(self.call))
        self.task = asyncio.ensure_future(stream(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        raise AssertionError("the call watches for the client's leaving, not the stream")

    async def _send(self, message: Message) -> None:
        await self.may_send.wait()
        if message["type"] == "http.response.body":
            self.out.append(f"sent {message['body'].decode()}")

    def say(self, letter: str, finish: Finish = Finish.NOT_YET) -> None:
        ids = self.engine.tokenizer.encode(letter, add_special_tokens=False)
        handle = self.call.outputs[0].handle
        self.engine.session.receive(tokens(handle, ids, finish), 0.0)

    async def settle(self) -> None:
        """Until everybody waits for what only the test can bring."""
        for _ in range(20):
            await asyncio.sleep(0)


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(30):
            await scene()

    asyncio.run(run())


def test_chunks_are_written_at_once_and_the_last_one_is_sent() -> None:
    async def scene() -> None:
        stream = Scene()
        await stream.settle()
        for letter in "abc":
            stream.say(letter)
            await stream.settle()
        stream.say("d", Finish.LENGTH)
        await stream.task
        assert stream.out == ["at once a", "at once b", "at once c", "sent d."]

    play(scene)


def test_news_that_come_together_are_one_chunk() -> None:
    async def scene() -> None:
        stream = Scene()
        await stream.settle()
        for letter in "abc":
            stream.say(letter)
        await stream.settle()
        assert stream.out == ["at once abc"]
        stream.call.cancel()
        await stream.task

    play(scene)


def test_a_full_connection_leaves_the_chunk_to_the_task() -> None:
    async def scene() -> None:
        stream = Scene()
        await stream.settle()
        stream.connection.has_room = False
        stream.may_send.clear()
        for letter in "abc":
            stream.say(letter)
            await stream.settle()
        assert stream.out == []
        stream.connection.has_room = True
        stream.may_send.set()
        await stream.settle()
        stream.say("d")
        await stream.settle()
        assert stream.out == ["sent a", "sent bc", "at once d"]
        stream.call.cancel()
        await stream.task

    play(scene)


def test_nothing_overtakes_a_chunk_that_waits() -> None:
    """The connection has room again, and there are news, but the task has not gone on yet."""

    async def scene() -> None:
        stream = Scene()
        await stream.settle()
        stream.connection.has_room = False
        stream.may_send.clear()
        stream.say("a")
        await stream.settle()
        stream.connection.has_room = True
        stream.say("b")
        await stream.settle()
        assert stream.out == []
        stream.may_send.set()
        await stream.settle()
        assert stream.out == ["sent a", "sent b"]
        stream.call.cancel()
        await stream.task

    play(scene)


def test_a_write_without_progress_is_given_up_and_its_call_cancelled() -> None:
    async def scene() -> None:
        stream = Scene(write_timeout_s=0.02)
        await stream.settle()
        stream.connection.has_room = False
        stream.may_send.clear()
        stream.say("a")
        while not stream.connection.num_aborts:
            await asyncio.sleep(0.001)
        assert stream.call.outputs[0].finish is Finish.ABORT
        assert stream.engine.session.num_live == 0
        stream.may_send.set()
        await stream.task
        assert stream.connection.num_aborts == 1

    play(scene)


def test_a_stream_without_news_is_no_stalled_one() -> None:
    async def scene() -> None:
        stream = Scene(write_timeout_s=0.02)
        await asyncio.sleep(0.1)
        assert stream.connection.num_aborts == 0
        stream.say("a", Finish.LENGTH)
        await stream.task
        assert stream.out == ["sent a."]

    play(scene)
