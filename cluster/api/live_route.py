"""`GET /live`: what the engine does, step by step, as server-sent events."""

import json
from collections.abc import AsyncIterator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from cluster.api.api_server import ApiServer, server_of

PULSE_S = 1.0
"""Silence after which a viewer is told that the server is there, and whether the engine is."""

router = APIRouter()


class LiveStream(StreamingResponse):
    """One viewer's stream, for as long as it stays connected."""

    media_type = "text/event-stream"

    def __init__(self, server: ApiServer) -> None:
        super().__init__((), headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        audience = self._server.audience
        viewer = audience.join()

        async def frames() -> AsyncIterator[bytes]:
            yield self._pulse()
            while not self._server.is_ending:
                yield await viewer.next(PULSE_S) or self._pulse()

        self.body_iterator = frames()
        try:
            await super().__call__(scope, receive, send)
        finally:
            audience.leave(viewer)

    def _pulse(self) -> bytes:
        engine = self._server.engine
        state = {"ready": engine.info is not None, "news": engine.news}
        return b"event: pulse\ndata: " + json.dumps(state).encode() + b"\n\n"


@router.get(
    "/live",
    tags=["engine"],
    summary="Watch the engine's steps",
    response_class=LiveStream,
    status_code=200,
    responses={200: {"content": {"text/event-stream": {}}}},
)
async def live(request: Request) -> Response:
    """A stream that ends when you leave. Each `data` is a `StepNews` of the wire protocol as
    JSON: how things are, and the steps since the last one. `pulse` events come in between."""
    return LiveStream(server_of(request))
