"""`GET /admin/status`: groups, ranks, nodes and epochs, as `stoker status` shows them."""

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cluster.api.api_server import server_of

router = APIRouter(tags=["administration"])


@router.get(
    "/admin/status",
    response_class=Response,
    responses={200: {"content": {"application/json": {}}}},
)
async def cluster_status(request: Request) -> Response:
    """The `Status` of the wire protocol as JSON. Fields that have their default are left out."""
    server = server_of(request)
    status = await server.engine.status(server.config.health_timeout_s)
    return Response(msgspec.json.encode(status), media_type="application/json")
