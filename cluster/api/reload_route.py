"""`POST /admin/reload`: other weights, group by group; `GET`: how far it is."""

from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse

from cluster.api.api_server import server_of
from cluster.api.errors import CANNOT_RELOAD, ApiError
from cluster.messages.changes import ModelReloaded, ReloadModel

router = APIRouter(tags=["administration"])


class ReloadBody(BaseModel):
    """Which weights."""

    model_config = ConfigDict(extra="forbid")

    model: Annotated[str, Field(max_length=4096)] = ""
    """A folder on the engine's host, or a name in its models directory; empty: what is in the
    same folder now."""


@router.post("/admin/reload", status_code=202)
async def reload(request: Request, body: ReloadBody) -> JSONResponse:
    """Let one worker group after the other come back with other weights. No stream ends.

    Answers at once; `GET` says how far it is. 409 with what differs if it is another model.
    """
    answer = await server_of(request).ask(ReloadModel(model=body.model), ModelReloaded)
    if answer.refusal:
        raise ApiError(answer.refusal, CANNOT_RELOAD, param="model")
    return JSONResponse(_fields(answer), status_code=202)


@router.get("/admin/reload")
async def progress(request: Request) -> JSONResponse:
    """How far the reload is that runs, or ran last."""
    answer = await server_of(request).ask(ReloadModel(only_asks=True), ModelReloaded)
    return JSONResponse(_fields(answer))


def _fields(answer: ModelReloaded) -> dict[str, object]:
    return {
        "object": "model.reloaded",
        "model_dir": answer.model_dir,
        "is_running": answer.is_running,
        "num_groups": answer.num_groups,
        "num_done": answer.num_done,
        "failure": answer.failure or None,
    }
