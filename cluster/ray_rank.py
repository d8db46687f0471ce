"""The body of one Ray actor: a `WorkerHost` in a process that Ray started, on any node."""

import os
import socket
import time
from pathlib import Path

import ray
from msgspec import Struct
from msgspec.structs import replace

from cluster.backend import WorkerLaunch, decode_launch
from cluster.config import add_environment, address_of_node
from cluster.errors import AddressError, ModelError
from cluster.lease import Lease
from cluster.logs import EventLog, show_events
from cluster.models import find_on_node
from cluster.node_address import interface_of, own_addresses
from cluster.worker_host import WorkerHost
from cluster.worker_main import build_model_runner, settle_on_cores


class RankSite(Struct, frozen=True):
    """Where an actor found itself."""

    node: str
    host: str
    cores: tuple[int, ...]
    problem: str = ""
    """Why it cannot be reached by other nodes."""


class RankActor:
    """One rank. Its methods are called by `cluster.ray_backend` alone."""

    def __init__(self) -> None:
        os.dup2(2, 1)  # what workers print belongs to the log, not to the supervisor's output
        self._listener: socket.socket | None = None

    def site(self, environment: dict[str, str]) -> RankSite:
        """Take over settings of the cluster's first host, and say where this is."""
        add_environment(environment)
        node = ray.get_runtime_context().get_node_id()
        cores = tuple(sorted(os.sched_getaffinity(0)))
        host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        try:
            return RankSite(node, address_of_node(host), cores)
        except AddressError as error:
            return RankSite(node, host, cores, problem=f"node {node_name(host)}: {error}")

    def listen(self, host: str) -> int:
        """Open the group's meeting place in rank 0's process; its port."""
        self._listener = socket.create_server((host, 0), family=_family(host))
        return int(self._listener.getsockname()[1])

    def run(self, launch_json: bytes) -> int:
        """Be the rank until its end; the exit code that a process would have."""
        began = time.monotonic()
        launch = decode_launch(launch_json)
        if self._listener is not None:
            place = replace(launch.rendezvous, listener_fd=self._listener.detach())
            launch = replace(launch, rendezvous=place)
        self._settle_on_interface(launch)
        show_events(f"worker {launch.name}", launch.log_level)
        settle_on_cores(launch)
        log = EventLog("worker", group=launch.group, epoch=launch.epoch, rank=launch.rank)
        name = node_name(str(ray.util.get_node_ip_address()))  # type: ignore[no-untyped-call]
        with Lease(launch, log) as lease:
            host = WorkerHost(
                launch,
                build_model_runner,
                log,
                began=began,
                find_model=find_model,
                node=name,
                lease=lease,
            )
            return host.run()

    def _settle_on_interface(self, launch: WorkerLaunch) -> None:
        """NCCL looks for an interface by itself, and may find one that the others do not reach."""
        place = launch.rendezvous
        if not place.is_one_host and place.hosts:
            interface = interface_of(place.hosts[launch.rank], own_addresses())
            if interface is not None:
                add_environment({"NCCL_SOCKET_IFNAME": f"={interface}"})  # =: just this name


def find_model(model_dir: str) -> Path:
    """Where this node has the model.

    Raises:
        ModelError: nowhere; the message names the node.
    """
    try:
        return find_on_node(model_dir)
    except ModelError as error:
        host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        raise ModelError(f"node {node_name(host)}: {error}") from error


def node_name(address: str) -> str:
    """What a user may know this node by."""
    return f"{address} ({socket.gethostname()})"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
