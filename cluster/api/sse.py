"""Server-sent events: the growth of a call's outputs, as frames on one connection.

Tokens that arrive while others are written make one chunk, so whoever reads slowly, and a
server with too much to do, gets fewer and larger ones. What a reader has not taken is bounded:
its socket's buffers hold what they hold, then the next write waits, and if that makes no
progress for `write_timeout_s`, the call is cancelled and the connection dropped.

A task per stream waits for news and sends them, as ASGI has it. Waking tasks and passing
through the layers around the application costs more than a chunk itself. So where the server
lends its `Connection`, chunks that need not wait are written at once, all streams' in one
callback; the task has the first chunk, the last one, and those that must wait.
"""

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl

from cluster.api.calls import Call
from cluster.api.errors import ApiError, api_error_of
from cluster.logs import EventLog

if TYPE_CHECKING:
    from cluster.api.api_server import ApiServer

DONE = b"data: [DONE]\n\n"

CONNECTION = "stoker.connection"
"""Name of the ASGI extension by which the server lends a `Connection`."""

_log = EventLog("api")


class Chunks(Protocol):
    """Writes frames in one route's shape; each call says what is new since the one before."""

    def growth(self) -> bytes:
        """Frames of everything that the outputs gained, ends included; may be empty."""

    def closing(self) -> bytes:
        """Frames after the end of all outputs, such as usage and `DONE`."""

    def failing(self, error: ApiError) -> bytes:
        """Frames that say why the stream ends early."""


class Connection:
    """What the server lends a response of its connection, beside what ASGI offers."""

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._transport, self._flow = transport, flow

    @property
    def is_free(self) -> bool:
        """Whether a write would leave at once, or join little that is unsent."""
        return not self._flow.write_paused and not self._transport.is_closing()

    @property
    def unsent_bytes(self) -> int:
        """Written, but not taken by the kernel yet."""
        return self._transport.get_write_buffer_size()

    def write(self, body: bytes) -> None:
        """One more part of a response that has begun, without a length (RFC 9112, 7.1)."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    def abort(self) -> None:
        """Drop it, and what is unsent with it."""
        self._transport.abort()


class Deliveries:
    """Streams with news, which are written one after the other once all news are in."""

    def __init__(self) -> None:
        self._due: dict[EventStream, None] = {}

    def note(self, stream: "EventStream") -> None:
        if not self._due:
            asyncio.get_running_loop().call_soon(self._write_all)
        self._due[stream] = None

    def _write_all(self) -> None:
        due, self._due = self._due, {}
        for stream in due:
            stream.write_now()


class EventStream(Response):
    """Sends a call's chunks as they come, and closes the call."""

    media_type = "text/event-stream"

    def __init__(self, call: Call, chunks: Chunks, headers: dict[str, str] | None = None) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", **(headers or {})})
        del self.headers["content-length"]
        self._call, self._chunks = call, chunks
        self._connection: Connection | None = None
        self._is_sending = True
        """Whether the task is at work, and nobody else may write."""
        self._fault: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call, chunks = self._call, self._chunks
        server: ApiServer = scope["app"].state.server
        self._connection = scope.get("extensions", {}).get(CONNECTION)
        patience = Patience(self, server.config.write_timeout_s)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if self._connection is not None:
                call.deliver_to(partial(server.deliveries.note, self))
            while not call.is_over:
                self._is_sending = False
                await call.news()
                self._is_sending = True
                if self._fault is not None:
                    raise self._fault
                if body := self._chunk():
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": chunks.growth() + self._end()})
        finally:
            patience.end()
            call.close()

    def write_now(self) -> None:
        """Write what has grown, or leave it to the task."""
        connection = self._connection
        assert connection is not None
        if self._is_sending or self._call.is_over or not connection.is_free:
            self._call.wake()
            return
        try:
            body = self._chunks.growth()
        except Exception as error:
            self._fault = error
            self._call.wake()
            return
        if body:
            connection.write(body)

    @property
    def unsent_bytes(self) -> int | None:
        """None while nothing waits to be sent."""
        if not self._is_sending:
            return None
        return 0 if self._connection is None else self._connection.unsent_bytes

    def cut_off(self) -> None:
        """End the call, and the connection without another word."""
        _log.warning("reader_cut_off", call=self._call.id, unsent_bytes=self.unsent_bytes)
        self._call.leave()
        if self._connection is not None:
            self._connection.abort()

    def _chunk(self) -> bytes:
        """What has grown, if the end is not near, with which it leaves together."""
        return b"" if self._call.is_over else self._chunks.growth()

    def _end(self) -> bytes:
        failure = self._call.failure
        if failure is None:
            return self._chunks.closing()
        return self._chunks.failing(api_error_of(failure))


class Patience:
    """Cuts a stream off whose reader has stopped reading.

    Looks at it every half of `limit_s`; a write that has got nowhere for two looks is given up.
    """

    def __init__(self, stream: EventStream, limit_s: float) -> None:
        self._stream = stream
        self._pause_s = limit_s / 2
        self._unsent_before: int | None = None
        self._num_idle_looks = 0
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._pause_s, self._look)

    def end(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        unsent = self._stream.unsent_bytes
        is_idle = unsent is not None and unsent == self._unsent_before
        self._num_idle_looks = self._num_idle_looks + 1 if is_idle else 0
        self._unsent_before = unsent
        if self._num_idle_looks == 2:
            self._stream.cut_off()
        else:
            self._timer = self._loop.call_later(self._pause_s, self._look)
