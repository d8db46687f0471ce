"""Asks this machine for its facts. Nothing is changed, and nothing waits for anybody else."""

import importlib.util
import os
import resource
import shutil
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from msgspec import Struct

from cluster.config import address_of_node, network_variables
from cluster.doctor.model_facts import model_facts
from cluster.doctor.scene import Host, Interface
from cluster.doctor.versions import collect_versions
from cluster.errors import AddressError
from cluster.links.addresses import check_address
from worker.host_memory import free_host_bytes

SHM = Path("/dev/shm")
DRIVER = Path("/proc/driver/nvidia")

NATIVE = {
    "kvcache/native/keys": "kvcache.native",
    "worker/ops/native/kernels": "worker.ops.native",
    "worker/ops/native/shared_reduce": "worker.ops.native",
}

RESOLVE_S = 2.0
"""For a name's address: without a name service the system takes many seconds to give up."""

RAY_CURRENT = Path("/tmp/ray/ray_current_cluster")
"""Where `ray start` writes the head's address."""

ANSWER_S = 0.5
"""For a head on this machine, or next to it, to take a connection."""


class Question(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a host is asked about beside itself."""

    node: str
    address: str = ""
    outward: str = ""
    """An address of another node, to which the way is looked up."""
    model_dir: str = ""
    disk_paths: tuple[str, ...] = ()
    own_sockets: tuple[str, ...] = ()
    """Addresses that the engine is to bind on this host."""
    looks_for_stale_ray: bool = False


def collect_host(question: Question) -> Host:
    """The facts of the machine that this process runs on."""
    name = socket.gethostname()
    interfaces, versions = read_interfaces(), collect_versions()
    soft_memory = _limit(resource.RLIMIT_MEMLOCK)
    shm = shutil.disk_usage(SHM) if SHM.is_dir() else None
    return Host(
        node=question.node,
        name=name,
        address=_own_address(question.address),
        python=versions["python"],
        ray=versions["ray"],
        torch=versions["torch"],
        stoker=versions["stoker"],
        missing_libraries=tuple(
            name for name, package in NATIVE.items() if _is_missing(name, package)
        ),
        model=model_facts(Path(question.model_dir)) if question.model_dir else None,
        interfaces=interfaces,
        name_resolves_to=resolve(name),
        address_outward=address_towards(question.outward) if question.outward else "",
        variables=dict(network_variables()),
        shm_bytes=shm.total if shm else 0,
        shm_free_bytes=shm.free if shm else 0,
        open_files=_limit(resource.RLIMIT_NOFILE),
        processes=_limit(resource.RLIMIT_NPROC),
        locked_memory_bytes=soft_memory,
        memory_bytes=psutil.virtual_memory().total,
        memory_free_bytes=free_host_bytes(),
        disk_free_by_path=_disks(question.disk_paths),
        num_cores=len(os.sched_getaffinity(0)),
        num_gpus=len(list((DRIVER / "gpus").glob("*"))),
        driver=_driver_version(),
        stale_ray=stale_ray() if question.looks_for_stale_ray else (),
        taken_addresses=tuple(
            f"{address}: {why}"
            for address in question.own_sockets
            if (why := why_not_bound(address))
        ),
    )


def _own_address(known: str) -> str:
    """Where other nodes are to reach this one, which Ray knows as `known`; empty for none."""
    try:
        return address_of_node(known) if known else ""
    except AddressError:  # which a check of its own says, too
        return known


def read_interfaces() -> tuple[Interface, ...]:
    """Every interface with the addresses that it has."""
    stats = psutil.net_if_stats()
    return tuple(
        Interface(
            name=name,
            addresses=tuple(
                entry.address.partition("%")[0]
                for entry in entries
                if entry.family in (socket.AF_INET, socket.AF_INET6)
            ),
            is_up=name not in stats or stats[name].isup,
        )
        for name, entries in sorted(psutil.net_if_addrs().items())
    )


def resolve(name: str, timeout_s: float = RESOLVE_S) -> tuple[str, ...]:
    """The addresses that a name has here; none if it has none, or nobody says in time."""
    found: list[str] = []

    def ask() -> None:
        with suppress(OSError):
            entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            found.extend(str(entry[4][0]) for entry in entries)

    asking = threading.Thread(target=ask, daemon=True)  # it cannot be broken off
    asking.start()
    asking.join(timeout_s)
    return tuple(dict.fromkeys(found))


def address_towards(host: str) -> str:
    """Of the interface by which packets to `host` leave; empty if there is no route."""
    with suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # of a datagram socket: chooses a route, sends nothing
            return str(probe.getsockname()[0])
    return ""


def why_not_bound(address: str) -> str:
    """Why a tcp:// address cannot be bound on this host now; empty if it can."""
    if not address.startswith("tcp://"):
        return ""
    try:
        check_address(address)
    except AddressError as error:
        return str(error)
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(target)
            listener.listen()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def stale_ray(current: Path = RAY_CURRENT) -> tuple[str, ...]:
    """Leftovers of Ray clusters that are gone, as texts.

    A raylet of this network whose head nobody answers for, and the file by which `auto` would
    find such a head.
    """
    found = []
    for process in psutil.process_iter(("pid", "name", "cmdline")):
        with suppress(psutil.Error, OSError):
            if process.info["name"] == "raylet" and _is_in_our_network(process.pid):
                head = _option(process.info["cmdline"], "--gcs-address")
                if head and not _answers(head):
                    found.append(f"raylet (pid {process.pid}) whose head {head} is gone")
    with suppress(OSError):
        head = current.read_text().strip()
        if head and not _answers(head):
            found.append(f"{current} names {head}, where nobody answers")
    return tuple(found)


def _is_in_our_network(pid: int) -> bool:
    return os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net")


def _option(words: Sequence[str], name: str) -> str:
    """Of a command line, the value of --name=VALUE."""
    given = [word.partition("=")[2] for word in words if word.startswith(f"{name}=")]
    return given[0] if given else ""


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with suppress(OSError, ValueError):
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
        return True
    return False


def _is_missing(name: str, package: str) -> bool:
    spec = importlib.util.find_spec(package)
    places = [] if spec is None else spec.submodule_search_locations or []
    stem = name.rpartition("/")[2]
    return not any(list(Path(place).glob(f"*{stem}*.so")) for place in places)


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _disks(paths: Sequence[str]) -> dict[str, int]:
    free: dict[str, int] = {}
    for path in paths:
        place = Path(path).absolute()
        while not place.exists() and place != place.parent:
            place = place.parent
        with suppress(OSError):
            free[str(place)] = shutil.disk_usage(place).free
    return free


def _driver_version() -> str:
    with suppress(OSError):
        words = (DRIVER / "version").read_text().split()
        return next((word for word in words if word[0].isdigit() and word.count(".") >= 1), "")
    return ""
