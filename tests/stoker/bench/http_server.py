"""The scripted server on a real socket, in a thread of its own."""

import asyncio
import json
import threading
from dataclasses import dataclass

from tests.stoker.bench.scripted_server import Answer, Body, Script

MODELS = {"object": "list", "data": [{"id": "tiny", "object": "model"}]}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: Body
    connection: int
    """Which connection, from 0."""


class HttpServer:
    """`with HttpServer(script) as server: server.url, server.asked`.

    Args:
        key: without which everything is 401.
        models: status of /v1/models.
        framing: how the end of a body is told: chunked, length, or close.
    """

    def __init__(
        self,
        script: Script,
        *,
        key: str | None = None,
        models_status: int = 200,
        framing: str = "chunked",
    ) -> None:
        self.asked: list[Asked] = []
        self.num_connections = 0
        self.url = ""
        self.closes_after: int | None = None
        """Answers on one connection after which the server closes it, without saying so."""
        self._script = script
        self._key = key
        self._models_status = models_status
        self._framing = framing
        self._loop = asyncio.new_event_loop()
        self._is_up = threading.Event()
        self._stop = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._run, name="http-server")

    @property
    def bodies(self) -> list[Body]:
        """Of all requests for an answer."""
        return [asked.body for asked in self.asked if asked.method == "POST"]

    def __enter__(self) -> "HttpServer":
        self._thread.start()
        assert self._is_up.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._talk, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._is_up.set()
        await self._stop.wait()
        server.close()
        for writer in self._writers:
            writer.close()
        await server.wait_closed()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        number, self.num_connections = self.num_connections, self.num_connections + 1
        try:
            num_answers = 0
            while await self._answer_one(reader, writer, number):
                num_answers += 1
                if num_answers == self.closes_after:
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            self._writers.discard(writer)

    async def _answer_one(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        pairs = [line.partition(":") for line in head[1:] if line]
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        data = await reader.readexactly(int(headers.get("content-length", "0")))
        body = json.loads(data) if data else {}
        self.asked.append(Asked(method, path, headers, body, number))
        await self._send(writer, self._answer_to(self.asked[-1]))
        return self._framing != "close"

    def _answer_to(self, asked: Asked) -> Answer:
        if self._key is not None and asked.headers.get("authorization") != f"Bearer {self._key}":
            return Answer([(0.0, b"{}")], 401)
        if asked.path.endswith("/v1/models"):
            return Answer([(0.0, json.dumps(MODELS).encode())], self._models_status)
        return self._script(asked.body, len(self.bodies) - 1)

    async def _send(self, writer: asyncio.StreamWriter, answer: Answer) -> None:
        if answer.is_cut and not answer.pieces:
            raise ConnectionResetError
        lines = [f"HTTP/1.1 {answer.status} X"]
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        if self._framing == "chunked":
            lines.append("Transfer-Encoding: chunked")
        elif self._framing == "length":
            lines.append(f"Content-Length: {sum(len(data) for _, data in answer.pieces)}")
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        for _, data in answer.pieces:
            framed = b"%x\r\n%s\r\n" % (len(data), data) if self._framing == "chunked" else data
            writer.write(framed)
        if answer.is_cut:
            await writer.drain()
            raise ConnectionResetError
        if self._framing == "chunked":
            writer.write(b"0\r\n\r\n")
        await writer.drain()
