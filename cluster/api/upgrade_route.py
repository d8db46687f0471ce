"""`POST /admin/upgrade`: new processes with the code that is installed now; `GET`: how far."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse

from cluster.api.api_server import server_of
from cluster.api.errors import CANNOT_UPGRADE, ApiError
from cluster.messages.changes import ClusterUpgraded, UpgradeCluster

router = APIRouter(tags=["administration"])


@router.post("/admin/upgrade", status_code=202)
async def upgrade(request: Request) -> JSONResponse:
    """Replace the engine core, every worker and every API server. No stream ends.

    Answers at once; `GET` says how far it is. 409 while one runs.
    """
    answer = await server_of(request).ask(UpgradeCluster(), ClusterUpgraded)
    if answer.refusal:
        raise ApiError(answer.refusal, CANNOT_UPGRADE)
    return JSONResponse(_fields(answer), status_code=202)


@router.get("/admin/upgrade")
async def progress(request: Request) -> JSONResponse:
    """How far the upgrade is that runs, or what came of the last one."""
    answer = await server_of(request).ask(UpgradeCluster(only_asks=True), ClusterUpgraded)
    return JSONResponse(_fields(answer))


def _fields(answer: ClusterUpgraded) -> dict[str, object]:
    return {
        "object": "cluster.upgraded",
        "phase": answer.phase,
        "num_done": answer.num_done,
        "failure": answer.failure or None,
    }
