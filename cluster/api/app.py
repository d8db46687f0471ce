"""The application: which routes there are, and one shape for everything that goes wrong."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from cluster.api import (
    cancel,
    docs_page,
    drain_route,
    health,
    live_route,
    metrics_route,
    page_route,
    reload_route,
    scale_route,
    status_route,
    upgrade_route,
)
from cluster.api.api_server import ApiServer
from cluster.api.description import described
from cluster.api.errors import ApiError, api_error_of
from cluster.api.openai import chat, completions, models_route, responses, tokens_route
from cluster.api.refusals import of_http_exception, of_validation_error
from cluster.frontend.errors import RequestError
from cluster.logs import EventLog
from scheduler.errors import InvalidRequest

ROUTERS: Sequence[APIRouter] = (
    chat.router,
    completions.router,
    docs_page.router,
    responses.router,
    models_route.router,
    tokens_route.router,
    cancel.router,
    scale_route.router,
    drain_route.router,
    reload_route.router,
    upgrade_route.router,
    status_route.router,
    health.router,
    live_route.router,
    metrics_route.router,
    page_route.router,
)
"""One of each module with routes."""

_NO_TELEMETRY: TelemetryConfig = {
    "tracing": False,
    "metrics": False,
    "logs": False,
    "operation_spans": False,
    "auto_configure": False,
}
"""FastAPI's own, which costs each call something and says less than `cluster.api.tracing`."""

_log = EventLog("api")


def create_app(server: ApiServer) -> FastAPI:
    """All routes over one `ApiServer`, which starts and ends with the application."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        server.engine.start()
        loading = asyncio.create_task(server.load_early())
        try:
            yield
        finally:
            loading.cancel()
            await server.engine.close()
            server.pool.close()

    app = FastAPI(
        title="Stoker",
        version=version("stoker"),
        docs_url=None,  # see `docs_page`: FastAPI's loads scripts from another host
        redoc_url=None,
        telemetry=_NO_TELEMETRY,
        lifespan=lifespan,
    )
    app.state.server = server
    for router in ROUTERS:
        app.include_router(router)
    server.metrics.routes = {
        route.path for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)
    }
    app.openapi_schema = described(app)
    for kind in (ApiError, InvalidRequest, RequestError, Exception):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(RequestValidationError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_error)
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    """Errors of routes, of bodies that do not fit, of FastAPI itself, and of our own bugs."""
    return error_response(error, f"{request.method} {request.url.path}")


def error_response(error: Exception, where: str = "") -> Response:
    """Any exception as the answer that a client gets."""
    match error:
        case RequestValidationError():
            answer = of_validation_error(error)
        case HTTPException():
            answer = of_http_exception(error, where)
        case _:
            answer = api_error_of(error)
    if answer.status == 500:
        _log.error("request_failed", where=where, error=repr(error))
    return Response(
        answer.body(), answer.status, headers=answer.headers, media_type="application/json"
    )
