"""Whether this server lives, and whether it can serve: two questions for two kinds of probe."""

from importlib.metadata import version

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse

from cluster.api.api_server import ApiServer, server_of
from cluster.api.errors import NOT_READY, SHUTTING_DOWN, ApiError
from cluster.frontend.errors import RequestError
from cluster.messages.reports import Status

router = APIRouter(tags=["health"])


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """Liveness: the engine's loop answers, however busy it is. Restart what fails this.

    200 also while the model is loaded and while running answers are finished before the end;
    503 if the engine has not answered within `health_timeout_s`, or cannot recover by itself.
    Needs no key.
    """
    status = await _ask(server_of(request))
    if status.state == "failed":
        raise ApiError("no worker group is left, and none will come", NOT_READY)
    return JSONResponse({"status": "ok", "engine": status.state})


@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """Readiness: a token can be made now. Send no calls to what fails this."""
    server = server_of(request)
    if not server.engine.is_connected:
        raise ApiError("no engine is connected: it starts, or is started again", NOT_READY)
    status = await _ask(server)
    if status.state == "stopping":
        raise ApiError("the engine finishes what runs and takes nothing new", SHUTTING_DOWN)
    num_ready = sum(group.state == "ready" for group in status.groups)
    if status.state != "serving" or not num_ready or server.engine.info is None:
        why = "".join(
            f"; group {g.group} was lost: {g.message}" for g in status.groups if g.message
        )
        raise ApiError(f"the engine is {status.state}; no token can be made now{why}", NOT_READY)
    return JSONResponse(
        {"status": "ready", "groups_ready": num_ready, "groups": len(status.groups)}
    )


@router.get("/version")
async def server_version() -> JSONResponse:
    """The version of this server."""
    return JSONResponse({"version": version("stoker")})


async def _ask(server: ApiServer) -> Status:
    """A round trip through the engine's loop.

    Raises:
        ApiError: 503, there was no answer in time.
    """
    limit_s = server.config.health_timeout_s
    try:
        return await server.engine.status(limit_s)
    except RequestError as error:
        raise ApiError(
            f"the engine did not answer within health_timeout_s={limit_s:g}: {error}", NOT_READY
        ) from error
