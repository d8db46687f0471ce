"""HTTP/1.1 for a load: many answers at once, each byte noted the moment it is read.

httpx spends several times as long on each chunk of a stream, which a measurement would show as
the server's; so this stands on asyncio's transports and httptools, the parser of uvicorn. Only
what a load needs: requests with a body and a length, kept-alive connections, TLS.
"""

import asyncio
import ssl
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import httptools

from stoker.bench.errors import BenchError
from stoker.bench.stream import Clock, Listener

LONG_IDLE_S = 1.0
"""Servers close connections that have been idle for a while; none does after less than this."""


class WholeBody:
    """An answer that is wanted whole."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status

    def feed(self, data: bytes, now: float) -> None:
        self.body += data

    def end(self) -> None:
        pass


class BadAddress(BenchError):
    """The base URL names no server that can be dialled."""


class ServerClosed(ConnectionError):
    """The server closed the connection before its answer was whole."""


class HttpClient:
    """Requests to one server, on connections that are kept and used again.

    Args:
        base_url: http:// or https://, a host, and perhaps a port and a path.
        headers: sent with every request.
        clock: says when bytes came in.
    Raises:
        BadAddress: the URL is of no such form.
    """

    def __init__(
        self, base_url: str, *, headers: Mapping[str, str] | None = None, clock: Clock
    ) -> None:
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise BadAddress(
                f"{base_url!r} is no address of a server; it should be like http://127.0.0.1:8000"
            )
        self._host = url.hostname
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._root = url.path.rstrip("/")
        self._headers = {"host": url.netloc.rpartition("@")[2], **(headers or {})}
        self._clock = clock
        self._idle: list[tuple[_Connection, float]] = []
        """And since when; the last one used is used again first."""
        self._open: set[_Connection] = set()

    async def post(self, path: str, body: bytes, listener: Listener) -> None:
        """Send JSON and hear the answer out.

        Raises:
            OSError: there is no connection, or it broke.
        """
        await self._exchange(self._head("POST", path, len(body)) + body, listener)

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a short answer."""
        whole = WholeBody()
        await self._exchange(self._head("GET", path, None), whole)
        return whole.status, whole.body

    def close(self) -> None:
        """Close every connection; answers under way break off."""
        for connection in list(self._open):
            connection.close()

    def _head(self, method: str, path: str, length: int | None) -> bytes:
        lines = [f"{method} {self._root}{path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in self._headers.items()]
        if length is not None:
            lines += ["content-type: application/json", f"content-length: {length}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    async def _exchange(self, request: bytes, listener: Listener) -> None:
        while self._idle:
            connection, since_s = self._idle.pop()
            if connection.is_closed:
                continue
            is_stale = self._clock() - since_s >= LONG_IDLE_S
            try:
                await self._run(connection, request, listener)
            except ServerClosed:
                if connection.has_heard or not is_stale:
                    raise
                continue  # closed while the request was on its way; the server never saw it
            return
        await self._run(await self._connect(), request, listener)

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _Connection(self._clock, self._open.discard),
            self._host,
            self._port,
            ssl=self._tls,
        )
        self._open.add(connection)
        return connection

    async def _run(self, connection: "_Connection", request: bytes, listener: Listener) -> None:
        try:
            can_stay = await connection.exchange(request, listener)
        except BaseException:  # also when cancelled: the answer that is left is nobody's
            connection.close()
            raise
        if can_stay:
            self._idle.append((connection, self._clock()))
        else:
            connection.close()


class _Connection(asyncio.Protocol):
    """One connection, with at most one request under way."""

    def __init__(self, clock: Clock, on_lost: "Callable[[_Connection], None]") -> None:
        self.is_closed = False
        self.has_heard = False
        """Whether anything of the present answer has come."""
        self._clock = clock
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._listener: Listener | None = None
        self._done: asyncio.Future[bool] | None = None
        self._headers: dict[str, str] = {}
        self._has_head = False
        self._now = 0.0

    async def exchange(self, request: bytes, listener: Listener) -> bool:
        """Send a request and wait for the end of its answer; says whether another may follow."""
        assert self._transport is not None
        assert self._done is None, "one request at a time"
        self._done = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._listener, self._headers = listener, {}
        self.has_heard = self._has_head = False
        self._transport.write(request)
        try:
            return await self._done
        finally:
            self._done = self._listener = None

    def close(self) -> None:
        self.is_closed = True
        if self._transport is not None:
            self._transport.abort()

    # --- told by asyncio ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            self.close()  # bytes that nobody asked for
            return
        self.has_heard = True
        self._now = self._clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not self._done.done():
                self._done.set_exception(ConnectionError(f"not HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = True
        self._on_lost(self)
        if self._done is None or self._done.done():
            return
        framed = self._headers.keys() & {"content-length", "transfer-encoding"}
        if self._has_head and not framed and error is None:
            self.on_message_complete()  # an answer without a length ends with its connection
            return
        self._done.set_exception(ServerClosed(str(error or "closed before the answer was whole")))

    # --- told by httptools ---

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._has_head = True
        if self._listener is not None:
            self._listener.head(self._parser.get_status_code(), self._headers)

    def on_body(self, body: bytes) -> None:
        if self._listener is not None:
            self._listener.feed(body, self._now)

    def on_message_complete(self) -> None:
        if self._listener is not None:
            self._listener.end()
        if self._done is not None and not self._done.done():
            self._done.set_result(not self.is_closed and self._parser.should_keep_alive())
