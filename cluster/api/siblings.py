"""Calls with an idempotency key, handed to the front end that they belong to.

The kernel chooses which of several front ends accepts a connection, so whoever comes back mostly
meets another one. A key belongs to one of them by its digest; the others pass such a call on, over
a socket in the cluster's private folder, and pass back what it answers. If that one is gone, the
call is served where it is, which costs time but no token (`cluster.api.openai.keyed`).
"""

import asyncio
import contextlib
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

import httptools
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api.exchange import CURRENT, REQUEST_ID
from cluster.api.limits import replayed
from cluster.api.sse import CONNECTION, Connection
from cluster.logs import EventLog

IDEMPOTENCY_KEY = "Idempotency-Key"

READ_BYTES = 1 << 16

_HOP_BY_HOP = {
    *("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"),
    *("expect", "date", REQUEST_ID),
}
"""Headers that are of one connection (RFC 9110, 7.6.1), or that we say ourselves."""

_log = EventLog("api")


def socket_path(folder: str, number: int) -> str:
    """Where an API server listens for its siblings; no longer than that of the front socket."""
    return str(Path(folder) / f"api{number}")


class Siblings:
    """Stands before the application, and behind what bounds and lets in."""

    def __init__(self, app: ASGIApp, *, folder: str, number: int, count: int) -> None:
        """
        Args:
            number: of this API server, among so many.
        """
        self._app = app
        self._folder, self._number, self._count = folder, number, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner = self._owner_of(scope)
        if owner == self._number:
            await self._app(scope, receive, send)
            return
        first = await receive()
        body = first.get("body", b"") if first["type"] == "http.request" else b""
        relay = _Relay(scope, receive, send)
        try:
            await relay.run(socket_path(self._folder, owner), body)
        except OSError as error:
            if relay.answer.has_begun:
                lent = scope.get("extensions", {}).get(CONNECTION)
                cast(Connection, lent).abort()  # the reader comes back, and finds somebody else
                return
            _log.warning("sibling_gone", number=owner, error=error)
            await self._app(scope, replayed(body, receive), send)

    def _owner_of(self, scope: Scope) -> int:
        """The number of the API server that a call belongs to."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["client"] is None:
            return self._number  # without an address it came from a sibling
        headers = Headers(scope=scope)
        key = headers.get(IDEMPOTENCY_KEY)
        if key is None:
            return self._number
        caller = headers.get("authorization", "")
        return zlib.crc32(f"{caller}\0{key}".encode()) % self._count


@dataclass(slots=True)
class _Answer:
    """What the parser has found of an answer, and nobody has passed back."""

    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    is_head_complete: bool = False
    has_begun: bool = False
    is_complete: bool = False
    body: bytearray = field(default_factory=bytearray)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.decode("latin-1").lower() not in _HOP_BY_HOP:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.is_head_complete = True

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.is_complete = True


class _Parser(Protocol):
    def feed_data(self, data: bytes) -> None: ...
    def get_status_code(self) -> int: ...


class _Relay:
    """One call there and its answer back."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self.answer = _Answer()

    async def run(self, path: str, body: bytes) -> None:
        """
        Raises:
            OSError: the sibling cannot be reached, or went before the end of its answer.
        """
        reader, writer = await asyncio.open_unix_connection(path)
        leaving = asyncio.create_task(self._close_when_left(writer))
        if exchange := CURRENT.get():
            exchange.is_passed_on = True
        try:
            writer.write(self._head(len(body)) + body)
            await self._pass_back(reader)
        finally:
            leaving.cancel()
            writer.close()
            if exchange and not self.answer.has_begun:
                exchange.is_passed_on = False
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _pass_back(self, reader: asyncio.StreamReader) -> None:
        answer = self.answer
        parser = cast(_Parser, httptools.HttpResponseParser(answer))
        while not answer.is_complete:
            data = await reader.read(READ_BYTES)
            if not data:
                raise ConnectionResetError("the sibling closed the connection in mid-answer")
            parser.feed_data(data)
            if answer.is_head_complete and not answer.has_begun:
                answer.has_begun = True
                await self._send(
                    {
                        "type": "http.response.start",
                        "status": parser.get_status_code(),
                        "headers": answer.headers,
                    }
                )
            if answer.body and not answer.is_complete:
                await self._send_body(more=True)
        await self._send_body(more=False)

    async def _send_body(self, *, more: bool) -> None:
        body = bytes(self.answer.body)
        self.answer.body.clear()
        message: Message = {"type": "http.response.body", "body": body, "more_body": more}
        await self._send(message)

    def _head(self, num_bytes: int) -> bytes:
        scope, exchange = self._scope, CURRENT.get()
        target: bytes = scope["raw_path"]
        if query := scope["query_string"]:
            target += b"?" + query
        headers = [
            (name, value)
            for name, value in scope["headers"]
            if name.decode("latin-1") not in _HOP_BY_HOP and name != b"content-length"
        ]
        headers += [(b"content-length", b"%d" % num_bytes), (b"connection", b"close")]
        if exchange is not None:
            headers.append((REQUEST_ID.encode(), exchange.request_id.encode()))
        lines = [b"%b: %b" % header for header in headers]
        return b"\r\n".join([b"POST %b HTTP/1.1" % target, *lines, b"", b""])

    async def _close_when_left(self, writer: asyncio.StreamWriter) -> None:
        """The sibling sees its caller leave as we see ours."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        writer.transport.abort()
