"""Server-sent events: the growth of a call's outputs, as frames on one connection.

Tokens that arrive while a write is under way make one chunk, so a slow reader costs fewer and
larger ones. What it has not taken is bounded: a socket's buffers hold what they hold, then the
next write waits, and if that makes no progress for `write_timeout_s`, the call is cancelled and
the connection dropped.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.api.calls import Call
from cluster.api.errors import ApiError, api_error_of
from cluster.http_config import HttpConfig
from cluster.logs import EventLog

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


@dataclass(frozen=True, slots=True)
class Connection:
    """What a stream may ask of its connection beside what ASGI offers."""

    abort: Callable[[], None]
    """Drop it, and what is unsent with it."""
    unsent_bytes: Callable[[], int]
    """Written, but not taken by the kernel yet."""


class EventStream(Response):
    """Sends a call's chunks as they come, and closes the call."""

    media_type = "text/event-stream"

    def __init__(self, call: Call, chunks: Chunks, headers: dict[str, str] | None = None) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", **(headers or {})})
        del self.headers["content-length"]
        self._call, self._chunks = call, chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call, chunks = self._call, self._chunks
        config: HttpConfig = scope["app"].state.server.config
        patience = Patience(scope, call, config.write_timeout_s)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while not call.is_over:
                await call.news()
                body = chunks.growth()
                if body:
                    patience.is_tried = True
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    patience.is_tried = False
            patience.is_tried = True
            await send({"type": "http.response.body", "body": chunks.growth() + self._end(chunks)})
        finally:
            patience.end()
            call.close()

    def _end(self, chunks: Chunks) -> bytes:
        failure = self._call.failure
        if failure is None:
            return chunks.closing()
        return chunks.failing(api_error_of(failure))


class Patience:
    """Ends a stream whose reader has stopped reading.

    Looks at it every half of `limit_s`; a write that has got nowhere for two looks is given up.
    """

    def __init__(self, scope: Scope, call: Call, limit_s: float) -> None:
        self.is_tried = False
        """Set by the stream while a write is under way."""
        self._connection: Connection | None = scope.get("extensions", {}).get(CONNECTION)
        self._call = call
        self._limit_s = limit_s
        self._unsent_before: int | None = None
        self._num_idle_looks = 0
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(limit_s / 2, self._look)

    def end(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        unsent = self._unsent_bytes() if self.is_tried else None
        if unsent is None or unsent != self._unsent_before:
            self._num_idle_looks = 0
        else:
            self._num_idle_looks += 1
        self._unsent_before = unsent
        if self._num_idle_looks == 2:
            self._cut_off(unsent)
        else:
            self._timer = self._loop.call_later(self._limit_s / 2, self._look)

    def _unsent_bytes(self) -> int:
        return 0 if self._connection is None else self._connection.unsent_bytes()

    def _cut_off(self, unsent: int | None) -> None:
        _log.warning(
            "reader_cut_off",
            call=self._call.id,
            write_timeout_s=self._limit_s,
            unsent_bytes=unsent,
        )
        self._call.cancel()
        if self._connection is not None:
            self._connection.abort()
