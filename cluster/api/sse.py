"""Server-sent events: the growth of a call's outputs, as frames on one connection."""

from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.api.calls import Call
from cluster.api.errors import api_error_of

DONE = b"data: [DONE]\n\n"


class Chunks(Protocol):
    """Writes frames in one route's shape; each call says what is new since the one before."""

    def growth(self) -> bytes:
        """Frames of everything that the outputs gained, ends included; may be empty."""

    def closing(self) -> bytes:
        """Frames after the end of all outputs, such as usage and `DONE`."""


class EventStream(Response):
    """Sends a call's chunks as they come, and closes the call."""

    media_type = "text/event-stream"

    def __init__(self, call: Call, chunks: Chunks, headers: dict[str, str] | None = None) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", **(headers or {})})
        del self.headers["content-length"]
        self._call, self._chunks = call, chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call, chunks = self._call, self._chunks
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while not call.is_done and call.failure is None:
                await call.news()
                await self._send(send, chunks.growth())
            if call.failure is None:
                await self._send(send, chunks.growth() + chunks.closing())
            else:
                error = api_error_of(call.failure)
                await self._send(send, chunks.growth() + b"data: " + error.body() + b"\n\n")
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            call.close()

    async def _send(self, send: Send, body: bytes) -> None:
        if body:
            await send({"type": "http.response.body", "body": body, "more_body": True})
