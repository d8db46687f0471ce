"""The main of an API server's process: `python -m cluster.api.server_main PARENT_PID < launch`.

It takes connections from a socket that its parent has bound, as soon as it can, whether or
not there is an engine yet, and says so in one line on standard output.
"""

import logging
import resource
import signal
import socket
import sys
from typing import TYPE_CHECKING

import msgspec
import uvicorn
import uvloop
from starlette.types import ASGIApp

from cluster.announcements import ApiServerListens, announce
from cluster.api.api_server import ApiServer
from cluster.api.app import create_app
from cluster.api.guard import guarded
from cluster.api.http_protocol import protocol_of
from cluster.api.leaving import LeavingServer
from cluster.api.siblings import socket_path
from cluster.api_server_launch import ApiServerLaunch
from cluster.frontend.engine_client import ClientConfig
from cluster.frontend.loop_client import LoopClient
from cluster.frontend.tokenizer_pool import TokenizerPool
from cluster.http_config import HttpConfig
from cluster.logs import show_events
from cluster.orphans import die_with_parent

if TYPE_CHECKING:
    from cluster.api.tracing import CallTracer

SWITCH_S = 0.001
"""How long threads that render templates keep Python from the loop, which has streams to write.
Less: shorter gaps in them, at the price of more switches while prompts are encoded."""


def main() -> int:
    """Serve until a signal comes; the exit code."""
    die_with_parent(int(sys.argv[1]), signal.SIGTERM)
    try:
        launch = msgspec.json.decode(sys.stdin.buffer.read(), type=ApiServerLaunch)
    except msgspec.DecodeError as error:
        print(f"no launch on standard input: {error}", file=sys.stderr)
        return 2
    show_events(f"api-{launch.number}", launch.log_level)
    _show_faults()
    _allow_many_files()
    sys.setswitchinterval(SWITCH_S)
    uvloop.run(serve(launch))
    return 0


async def serve(launch: ApiServerLaunch) -> None:
    """Take connections until a signal comes, then finish the answers that run."""
    engine = LoopClient(
        ClientConfig(
            address=launch.front_address,
            label=f"api server {launch.number}",
            key_file=launch.key_file,
            recovery_s=launch.recovery_s,
        )
    )
    pool = TokenizerPool(launch.http.encode_threads)
    server = ApiServer(launch.http, engine, pool, metrics_dir=launch.metrics_dir)
    tracer = _trace(server)
    app = guarded(
        create_app(server), server, number=launch.number, siblings_dir=launch.siblings_dir
    )
    http = LeavingServer(
        uvicorn_config(app, launch.http),
        drain_s=launch.drain_s,
        on_started=lambda: announce(ApiServerListens()),
        on_leaving=server.leave,
        cut_off=engine.close,
        siblings_path=launch.siblings_dir and socket_path(launch.siblings_dir, launch.number),
    )
    await http.serve(sockets=[socket.socket(fileno=launch.listen_fd)])
    pool.close()
    if tracer is not None:
        tracer.close()


def _trace(server: ApiServer) -> "CallTracer | None":
    """Send spans of its calls, if somewhere is said where to."""
    config, engine = server.config, server.engine
    if not config.otlp_endpoint:
        return None
    from cluster.api.tracing import CallTracer, provider_to  # what it imports is optional

    def model() -> str:
        if config.served_model_names:
            return config.served_model_names[0]
        return engine.info.model if engine.info is not None else ""

    tracer = CallTracer(provider_to(config.otlp_endpoint), model=model)
    server.observers.append(tracer.observe)
    return tracer


def uvicorn_config(app: ASGIApp, config: HttpConfig) -> uvicorn.Config:
    """No log of its own, no header that names it, no protocol but HTTP."""
    return uvicorn.Config(
        app,
        http=protocol_of(config),  # type: ignore[arg-type]  # it only calls what it takes for a class
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(config.keep_alive_s),
    )


def _allow_many_files() -> None:
    """A connection is an open file, and many systems allow a thousand until asked."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _show_faults() -> None:
    """uvicorn says with a traceback what our code raised; its other lines say nothing new."""
    faults = logging.getLogger("uvicorn.error")
    faults.setLevel(logging.ERROR)
    faults.propagate = False
    for handler in logging.getLogger("stoker").handlers:
        faults.addHandler(handler)


if __name__ == "__main__":
    sys.exit(main())
