"""HTTP/1.1 on one connection, with bounds on what a caller may make us keep or wait for.

uvicorn's own protocol keeps whatever it is sent before a body, and waits for it for ever; and
while one answer is given it does not notice that a caller leaves who had sent the next request
already. Bodies are bounded where they are read (`cluster.api.limits`).
"""

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from cluster.api.errors import BAD_REQUEST, HEADERS_TOO_LARGE, TIMED_OUT, ApiError
from cluster.api.sse import CONNECTION, Connection
from cluster.http_config import HttpConfig
from cluster.logs import EventLog

OVERHEAD_PER_BYTE = 16
"""Most bytes around one byte of a body: chunks of one byte have five or six."""

_log = EventLog("api")

REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLimits:
    """Of the request line and headers of one request."""

    max_bytes: int
    max_count: int
    timeout_s: float


ProtocolFactory: TypeAlias = "partial[BoundedProtocol]"


def protocol_of(config: HttpConfig) -> ProtocolFactory:
    """What makes the protocol of each connection."""
    limits = HeadLimits(
        max_bytes=config.max_header_bytes,
        max_count=config.max_header_count,
        timeout_s=config.read_timeout_s,
    )
    return partial(BoundedProtocol, limits=limits)


class BoundedProtocol(HttpToolsProtocol):
    """Refuses heads that are too large (431) or too slow (408), and bodies that are mostly frame.

    A refusal ends the connection, since what follows cannot be told from what was refused.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: HeadLimits,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._is_in_head = True
        self._has_head = False
        """Whether what came last ended a head."""
        self._head_bytes = 0
        self._num_headers = 0
        self._frame_budget = 0
        """Bytes that may still come before the end of the body without being of the body."""
        self._head_limit: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None
        self._running: RequestResponseCycle | None = None
        self._ahead = b""
        """What came while an answer was given. Read, so that the end of the connection is seen."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limit_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unlimit_head()
        super().connection_lost(exc)
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()

    @property
    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return  # the transport closes
        if self._is_in_head and self._is_answering:
            self._ahead += data
            if len(self._ahead) > self._limits.max_bytes:
                self.transport.close()  # nobody needs to be that far ahead
            return
        was_in_head = self._is_in_head
        if was_in_head and self._head_limit is None:
            self._limit_head()
        if not was_in_head:
            self._frame_budget -= len(data)
        self._has_head = False
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._is_in_head and was_in_head and not self._has_head:
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.max_bytes:
                self._refuse(self._head_too_large())
        elif not self._is_in_head and self._frame_budget < 0:
            self._refuse(ApiError("the body's frame is far larger than the body", BAD_REQUEST))

    # --- what the parser finds ---

    def on_message_begin(self) -> None:
        self._num_headers = 0
        super().on_message_begin()
        lent = Connection(self.transport, self.flow)
        self.scope["extensions"] = {CONNECTION: lent}  # type: ignore[dict-item]  # ours is no dict

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._limits.max_bytes:
            self._fail(self._head_too_large())

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > self._limits.max_count:
            self._fail(
                ApiError(
                    f"a request may have {self._limits.max_count} headers (max_header_count)",
                    HEADERS_TOO_LARGE,
                )
            )
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.max_bytes:
            self._fail(self._head_too_large())
        self._unlimit_head()
        self._is_in_head, self._has_head, self._head_bytes = False, True, 0
        self._frame_budget = self._limits.max_bytes + (1 << 18)  # and what one read brings
        super().on_headers_complete()
        if self.cycle is not self._running:
            self.flow.resume_reading()  # one request ahead is read, and waits for its turn

    def on_body(self, body: bytes) -> None:
        self._frame_budget += OVERHEAD_PER_BYTE * len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_head = True
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        ahead, self._ahead = self._ahead, b""
        if ahead:
            self.loop.call_soon(self._go_on, ahead)

    def _go_on(self, ahead: bytes) -> None:
        if not self.transport.is_closing():
            self.data_received(ahead)

    # --- limits in time ---

    def _limit_head(self) -> None:
        self._head_limit = self.loop.call_later(self._limits.timeout_s, self._head_is_late)

    def _unlimit_head(self) -> None:
        if self._head_limit is not None:
            self._head_limit.cancel()
            self._head_limit = None

    def _head_is_late(self) -> None:
        self._head_limit = None
        if self._is_answering:
            self._limit_head()  # the next request can wait for the end of this one's answer
            return
        self._refuse(
            ApiError(
                f"the headers were not here within read_timeout_s={self._limits.timeout_s:g}",
                TIMED_OUT,
            )
        )

    # --- refusals ---

    def _head_too_large(self) -> ApiError:
        return ApiError(
            f"the request line and headers may have {self._limits.max_bytes} bytes "
            "(max_header_bytes)",
            HEADERS_TOO_LARGE,
        )

    def _fail(self, error: ApiError) -> None:
        """From within the parser, which gives up on an exception: then the answer is sent."""
        self._refusal = error
        raise error

    def _refuse(self, error: ApiError) -> None:
        self._refusal = error
        self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        """What the base class calls when the parser has given up."""
        error = self._refusal or ApiError("this is not HTTP/1.1 as it should be", BAD_REQUEST)
        self._refusal = error
        self._unlimit_head()
        where = self.client[0] if self.client else ""
        _log.info("connection_refused", client=where, status=error.status, reason=error)
        if not self._is_answering:
            body = error.body()
            head = (
                f"HTTP/1.1 {error.status} {REASONS[error.status]}\r\n"
                "content-type: application/json\r\n"
                f"content-length: {len(body)}\r\n"
                "connection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
