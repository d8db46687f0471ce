"""`POST /admin/drain`: take a node out of service, or put it back."""

import asyncio
import time
from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse

from cluster.api.api_server import server_of
from cluster.api.errors import CANNOT_DRAIN, ApiError
from cluster.messages.changes import DrainNode, NodeDrained

router = APIRouter(tags=["administration"])

LOOK_S = 0.2
"""How often the engine is asked whether the node is empty."""


class DrainBody(BaseModel):
    """Which node."""

    model_config = ConfigDict(extra="forbid")

    node: Annotated[str, Field(min_length=1, max_length=255)]
    """Host name, as `stoker status` shows it, or address."""
    undo: bool = False
    """Groups may start there again."""
    wait_s: Annotated[float, Field(ge=0, le=3600)] = 0.0
    """How long the answer may wait until no worker process is left there."""


@router.post("/admin/drain")
async def drain(request: Request, body: DrainBody) -> JSONResponse:
    """Take every worker group off a node at once, and start none there. No stream ends.

    Asked again, the answer says how far it is. 409 with the reason if nothing can leave.
    """
    server = server_of(request)
    deadline = time.monotonic() + body.wait_s
    while True:
        answer = await server.ask(DrainNode(body.node, body.undo), NodeDrained)
        if answer.refusal:
            raise ApiError(answer.refusal, CANNOT_DRAIN, param="node")
        if body.undo or not answer.num_leaving or time.monotonic() >= deadline:
            break
        await asyncio.sleep(LOOK_S)
    return JSONResponse(
        {
            "object": "node.drained",
            "node": body.node,
            "groups_leaving": answer.num_leaving,
            "waits_for": answer.waits_for or None,
            "drained_nodes": list(answer.nodes),
        }
    )
