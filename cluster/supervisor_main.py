"""The main of a cluster's process: `python -m cluster.supervisor_main < settings`.

The settings are one line of JSON (`cluster.config.encode_config`). Standard input stays open:
its end says that the parent is gone, and ends the cluster. Standard output carries one line,
`ClusterReady` or `ClusterFailed`; everything else goes to the log on standard error.
"""

import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

import psutil

from cluster.announcements import ClusterFailed, ClusterReady, announce
from cluster.api_servers import ApiServers
from cluster.backend import Backend, Report
from cluster.config import decode_config, has_gpu, own_environment_for_workers
from cluster.doctor.examination import examine_start
from cluster.engine_config import EngineConfig
from cluster.errors import AddressError, ClusterLost, ModelError, StartFailed, StartInterrupted
from cluster.http_config import HttpConfig
from cluster.launch_plan import LaunchPlan
from cluster.libraries import check_libraries, libraries_of
from cluster.links.addresses import is_loopback, is_wildcard
from cluster.links.sockets import fresh_keys
from cluster.listener import Listener
from cluster.local_backend import LocalBackend
from cluster.logs import EventLog, show_events
from cluster.model_check import check_model
from cluster.models import DEFAULT_MODEL, resolve_model
from cluster.start_phases import process_began
from cluster.supervisor import Supervisor
from cluster.wakeup import SignalPipe
from scheduler.errors import ConfigError

EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130

CANNOT_START = (ConfigError, ModelError, AddressError, StartFailed, StartInterrupted)
"""What `run_cluster` raises when nothing came up."""


OPEN_TO_ALL = (
    "everybody who reaches this address can use the model: set api_keys (--api-key, "
    "STOKER_API_KEY), or serve at loopback (--host 127.0.0.1)"
)

PLAIN_FRONT = (
    "everybody who reaches front_address={address} can use the model and read what others ask it: "
    "leave encrypt on, or listen at loopback (tcp://127.0.0.1:PORT) or at an ipc:// path"
)

FRONT_EVERYWHERE = (
    "front_address={address} listens on every network of this machine. Give the one address that "
    "clients dial, unless all of them are meant"
)

PlanMaker: TypeAlias = Callable[[EngineConfig, EventLog], LaunchPlan]
BackendMaker: TypeAlias = Callable[[LaunchPlan, Report, EventLog], Backend]


def main(make_plan: PlanMaker | None = None, make_backend: BackendMaker | None = None) -> int:
    """Run one cluster for a parent process; the exit code."""
    line = sys.stdin.buffer.readline()
    try:
        run_cluster(
            decode_config(line),
            on_ready=announce,
            parent_fd=sys.stdin.fileno(),
            make_plan=make_plan,
            make_backend=make_backend,
        )
    except StartInterrupted as error:
        announce(ClusterFailed(message=str(error)))
        return EXIT_INTERRUPTED
    except CANNOT_START as error:
        announce(ClusterFailed(message=str(error)))
        return EXIT_FAILED
    except ClusterLost as error:
        EventLog("supervisor").error("cluster_lost", error=error)
        return EXIT_FAILED
    return EXIT_DONE


def run_cluster(
    config: EngineConfig,
    *,
    on_ready: Callable[[ClusterReady], None],
    http: HttpConfig | None = None,
    parent_fd: int | None = None,
    make_plan: PlanMaker | None = None,
    make_backend: BackendMaker | None = None,
) -> None:
    """Bring a cluster up in this process's main thread, and keep it until a signal comes.

    Args:
        on_ready: told once, when requests are taken.
        http: where to serve HTTP; None: nowhere.
        parent_fd: a descriptor whose end of file ends the cluster, too.
        make_plan: finds the model and settles what depends on this host.
        make_backend: chooses who starts the workers.

    Raises:
        ConfigError, ModelError, AddressError, StartFailed: it did not come up, and why.
        StartInterrupted: a signal came before it was up.
        ClusterLost: it was up and could not go on.
    """
    show_events("supervisor", config.log_level)
    log = EventLog("supervisor")
    warn_of_open_sockets(config, log)
    plan = (make_plan or plan_launch)(config, log)
    choose = make_backend or backend_of
    signals = SignalPipe((signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2))
    api = None if http is None or not http.http else open_http(http, config, log)
    supervisor = Supervisor(
        plan,
        lambda report: choose(plan, report, log),
        signals,
        parent_fd=parent_fd,
        on_ready=on_ready,
        log=log,
        api=api,
        began=process_began(),
        examine=None if make_plan else partial(examine_start, plan.config, plan.model_dir),
    )
    try:
        supervisor.run()
    finally:
        if supervisor.is_stuck:
            log.error("backend_stuck", remedy="its processes are killed")
            end_with_descendants()


def open_http(http: HttpConfig, config: EngineConfig, log: EventLog) -> ApiServers:
    """Bind the port of HTTP, for servers that are started later.

    Raises:
        AddressError: it cannot be bound.
    """
    listener = Listener(http.host, http.port)
    log.info("http_bound", url=listener.url, api_servers=http.api_servers)
    if not listener.is_loopback and not http.api_keys:
        log.warning("http_open_to_all", url=listener.url, remedy=OPEN_TO_ALL)
        print(f"stoker: warning: {OPEN_TO_ALL}", file=sys.stderr)  # whatever the log's level
    return ApiServers(
        http,
        listener,
        drain_s=config.drain_s,
        recovery_s=config.recovery_s,
        log_level=config.log_level,
        log=log,
    )


def warn_of_open_sockets(config: EngineConfig, log: EventLog) -> None:
    """Say loudly what an explicit setting opens to more than one should think."""
    address = config.front_address
    if not address.startswith("tcp://") or is_loopback(address):
        return
    texts = [FRONT_EVERYWHERE] if is_wildcard(address) else []
    texts += [] if config.encrypt else [PLAIN_FRONT]
    for text in texts:
        log.warning("front_socket_open", remedy=text.format(address=address))
        print(f"stoker: warning: {text.format(address=address)}", file=sys.stderr)


def end_with_descendants() -> None:
    """Kill every process that this one started, directly or not, and end at once."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    os._exit(EXIT_FAILED)


def plan_launch(config: EngineConfig, log: EventLog) -> LaunchPlan:
    """Find the model, fetching it if need be, and settle what depends on this host.

    Raises:
        ConfigError, ModelError
    """
    resolved = config.resolved(has_gpu=has_gpu())
    check_libraries(libraries_of(resolved))
    model_dir = resolve_model(
        resolved.model,
        Path(resolved.models_dir),
        report=lambda what: log.info("model", doing=what),
    )
    check_model(
        model_dir,
        resolved.tensor_parallel_size,
        resolved.pipeline_parallel_size,
        resolved.max_model_len,
    )
    return LaunchPlan(
        config=resolved,
        model=resolved.model or DEFAULT_MODEL,
        model_dir=model_dir.resolve(),
        engine_id=secrets.token_hex(4),
        key=secrets.token_urlsafe(32),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        front_keys=fresh_keys() if resolved.encrypt else None,
        back_keys=fresh_keys() if resolved.encrypt else None,
    )


def backend_of(plan: LaunchPlan, report: Report, log: EventLog) -> Backend:
    """Who starts the workers, by the config."""
    config = plan.config
    if config.backend == "local":
        num_ranks = config.most_groups * config.ranks_per_group
        return LocalBackend(
            report,
            num_ranks=num_ranks,
            cores=plan.cores,
            log=log,
            weights_key=plan.key if config.keeps_weights else "",
            forks=config.device == "cpu",
        )
    from cluster.ray_backend import RayBackend  # Ray takes half a second to import

    return RayBackend(
        report,
        num_ranks=config.num_ranks,
        cores=plan.cores,
        log=log,
        address=config.ray_address,
        uses_gpus=config.device == "cuda",
        environment=own_environment_for_workers(config.worker_env) if config.ray_address else {},
        patience_s=config.room_timeout_s if config.ray_address else 0.0,
        weights_key=plan.key if config.keeps_weights else "",
    )


if __name__ == "__main__":
    sys.exit(main())
