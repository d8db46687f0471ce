"""What stands around the application: ids and the log, browsers' rules, keys, limits."""

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from cluster.api.api_server import ApiServer
from cluster.api.auth import KeyGuard
from cluster.api.exchange import REQUEST_ID, ExchangeLog
from cluster.api.limits import BodyLimit
from cluster.api.siblings import Siblings
from cluster.logs import EventLog


def guarded(app: ASGIApp, server: ApiServer, *, number: int = 0, siblings_dir: str = "") -> ASGIApp:
    """The application as callers meet it. The last line here is the outermost.

    Args:
        number: of this API server.
        siblings_dir: where all of them can be reached; empty: it stands alone.
    """
    config = server.config
    if siblings_dir and config.api_servers > 1:
        app = Siblings(app, folder=siblings_dir, number=number, count=config.api_servers)
    app = BodyLimit(app, max_bytes=config.max_body_bytes, timeout_s=config.read_timeout_s)
    app = KeyGuard(app, config.api_keys, config.open_paths)
    if config.cors_origins:  # outside the keys, since browsers ask for leave without one
        app = CORSMiddleware(
            app,
            allow_origins=config.cors_origins,
            allow_methods=("*",),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID, "retry-after", "x-stoker-warning"),
        )
    return ExchangeLog(
        app,
        is_leaving=lambda: server.is_leaving,
        observe=server.observe,
        log=EventLog("api"),
    )
