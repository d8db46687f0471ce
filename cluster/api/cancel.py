"""`POST /v1/requests/{id}/cancel`: end a call that anybody of this server's is waiting for."""

from typing import Annotated

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import JSONResponse

from cluster.api.api_server import server_of
from cluster.api.errors import UNKNOWN_REQUEST, ApiError
from cluster.messages.clients import CancelByLabel, Cancelled

router = APIRouter(tags=["requests"])

RequestId = Annotated[
    str,
    Path(
        max_length=128,
        description='The `id` of the answer, such as "chatcmpl-…", or the `X-Request-Id` that the '
        "caller sent.",
    ),
]


@router.post("/v1/requests/{request_id}/cancel")
async def cancel(request: Request, request_id: RequestId) -> JSONResponse:
    """End a running or waiting call, whichever process it came in by.

    Its own answer becomes an error with the code `request_cancelled`; a stream ends with that.
    404 if there is no such call, for example because it was answered meanwhile.
    """
    answer = await server_of(request).ask(CancelByLabel(request_id), Cancelled)
    if not answer.count:
        raise ApiError(f"no request {request_id!r:.140} is live here", UNKNOWN_REQUEST)
    return JSONResponse({"id": request_id, "object": "request.cancelled", "cancelled": True})
