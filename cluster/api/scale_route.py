"""`POST /admin/scale`: how many worker groups the cluster shall have."""

from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse

from cluster.api.api_server import server_of
from cluster.api.errors import CANNOT_SCALE, ApiError
from cluster.messages.changes import Scaled, ScaleGroups

router = APIRouter(tags=["administration"])


class ScaleBody(BaseModel):
    """How many groups."""

    model_config = ConfigDict(extra="forbid")

    num_groups: Annotated[int | None, Field(ge=1, le=65_536)]
    """null: as many as load needs, between the cluster's `min_groups` and `max_groups`."""


@router.post("/admin/scale")
async def scale(request: Request, body: ScaleBody) -> JSONResponse:
    """Have so many worker groups from now on. They start and leave meanwhile; no stream ends.

    409 with the reason if there cannot be so many.
    """
    answer = await server_of(request).ask(ScaleGroups(body.num_groups), Scaled)
    if answer.refusal:
        raise ApiError(answer.refusal, CANNOT_SCALE, param="num_groups")
    return JSONResponse(
        {
            "object": "cluster.scaled",
            "num_groups": answer.num_groups,
            "is_automatic": answer.is_automatic,
        }
    )
