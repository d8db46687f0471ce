"""Worker processes as Ray actors: placed, started and watched by Ray, which is in no step's path.

One placement group per worker group (`cluster.ray_room`), one actor per rank
(`cluster.ray_rank`), which hosts the same `WorkerHost` as a plain process. Without an address a
Ray of our own is started on this host, with every socket on loopback, its own token, and its
files in a folder that `close` removes. Every wait on Ray has a limit and says what it waits for.
"""

import contextlib
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from msgspec.structs import replace

from cluster.backend import Place, RankExit, Report, WorkerLaunch, encode_launch
from cluster.cores import deal_cores
from cluster.errors import BackendError
from cluster.logs import EventLog

if TYPE_CHECKING:  # Ray reads its settings from the environment when it is imported
    from ray import ObjectRef
    from ray.actor import ActorHandle

    from cluster.ray_rank import RankActor, RankSite
    from cluster.ray_room import NodeRoom, Room

OBJECT_STORE_BYTES = 80 << 20
"""Ray's least is 75 MiB. Nothing of ours goes through its object store."""

KNOCK_S = 5.0
"""For a Ray elsewhere to take a connection."""

CONNECT_SUSPICION_S = 3.0
"""A Ray that answers does so in less; one that has not is asked whether it refuses the token."""

TOKEN_CHECK_S = 10.0

CLOSE_WAIT_S = 5.0
"""For killed actors to be reported."""

_T = TypeVar("_T")

_OWN_CLUSTER = {
    # Despite its name: the node address becomes 127.0.0.1 and every socket stays on loopback.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    # Ray would kill workers by its own idea of memory; we size the pools ourselves.
    "RAY_memory_monitor_refresh_ms": "0",
}
_EVERY_CLUSTER = {
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    # Ray's autoscaler would print its news among our own output.
    "RAY_SCHEDULER_EVENTS": "0",
    # Else Ray prints a stack trace when the supervisor is asked to end.
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
}


class _Method(Protocol):
    """One method of an actor as seen from here; Ray's own types lose its result."""

    def remote(self, *args: object) -> object: ...


class _Actor(Protocol):
    """A handle of a `RankActor`."""

    @property
    def site(self) -> _Method: ...

    @property
    def listen(self) -> _Method: ...

    @property
    def run(self) -> _Method: ...


class RayBackend:
    """Actors of this driver. `num_ranks` ranks of all groups share the nodes."""

    def __init__(
        self,
        report: Report,
        *,
        num_ranks: int,
        cores: Sequence[int],
        log: EventLog,
        address: str = "",
        uses_gpus: bool = False,
        environment: Mapping[str, str] | None = None,
        patience_s: float = 0.0,
    ) -> None:
        """Nothing is started yet.

        Args:
            cores: of this host; a Ray of our own has as many CPUs.
            address: of the Ray to connect to; empty: one of our own.
            environment: variables for workers on nodes that do not set them.
            patience_s: how long nodes with missing room may take to join.
        """
        self._report = report
        self._num_ranks = num_ranks
        self._cores = tuple(cores)
        self._log = log
        self._address = address
        self._uses_gpus = uses_gpus
        self._environment = dict(environment or {})
        self._patience_s = patience_s
        self._folder: Path | None = None
        self._is_open = False
        self._groups: dict[tuple[int, int], _Group] = {}
        self._spare: dict[int, Room] = {}
        """Room taken at the first `place` for the groups that are placed next."""
        self._has_reserved = False

    def open(self, timeout_s: float) -> str:
        """Connect to the Ray at `address`, or start one here."""
        own = {} if self._address else _OWN_CLUSTER
        for name, value in {**_EVERY_CLUSTER, **own}.items():
            os.environ[name] = value
        started = time.monotonic()
        if self._address:
            self._connect(timeout_s)
        else:
            self._start_own()
        import ray

        self._is_open = True
        host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        self._log.info(
            "ray_ready", seconds=time.monotonic() - started, own=not self._address, host=host
        )
        return host if self._address else ""

    def _connect(self, timeout_s: float) -> None:
        """In a thread: Ray itself tries for 20 s before it says that it was refused."""
        problems: list[Exception] = []

        def connect() -> None:
            import ray

            try:
                ray.init(self._address, log_to_driver=True, logging_level=logging.ERROR)
            except Exception as error:
                problems.append(error)

        try:
            _knock(self._address)
        except OSError as error:
            raise BackendError(self._no_ray(error)) from error
        thread = threading.Thread(target=connect, name="ray-connect", daemon=True)
        thread.start()
        thread.join(min(CONNECT_SUSPICION_S, timeout_s))
        if thread.is_alive() and _is_refused(self._address):
            raise BackendError(
                f"the Ray at {self._address} refuses this host's token. Give the one that the "
                "cluster was started with: RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE, or "
                "~/.ray/auth_token"
            )
        thread.join(timeout_s)
        if thread.is_alive():
            raise BackendError(f"the Ray at {self._address} did not answer within {timeout_s:g} s")
        if problems:
            raise BackendError(self._no_ray(problems[0])) from problems[0]

    def _no_ray(self, error: Exception) -> str:
        return (
            f"no Ray cluster answers at {self._address}: {error}. Start one with "
            "`ray start --head`, or leave the address away to have one made here"
        )

    def _start_own(self) -> None:
        # Ray opens its own folder to everybody, so it gets one inside a private one. The names
        # are short because the paths of Ray's sockets must stay below 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="stoker-ray-"))
        token = self._folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
        import ray

        try:
            ray.init(
                "local",
                num_cpus=len(self._cores) or None,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=True,
                logging_level=logging.ERROR,
                _temp_dir=str(self._folder / "r"),
            )
        except Exception as error:
            raise BackendError(f"Ray did not start on this host: {error}") from error

    def nodes(self) -> "list[NodeRoom]":
        """The nodes that are there, with what each has."""
        from cluster.ray_room import list_nodes

        return list_nodes()

    def place(
        self, group: int, epoch: int, num_stages: int, ranks_per_stage: int, timeout_s: float
    ) -> tuple[Place, ...]:
        deadline = time.monotonic() + timeout_s
        if not self._has_reserved:
            self._has_reserved = True
            num_groups = max(1, self._num_ranks // (num_stages * ranks_per_stage))
            for number in range(group, group + num_groups):
                self._spare[number] = self._room(num_stages, ranks_per_stage)
            self._wait_for(list(self._spare.values()), deadline)
        room = self._spare.pop(group, None)
        if room is None:
            room = self._room(num_stages, ranks_per_stage)
            self._wait_for([room], deadline)
        placed = self._groups[group, epoch] = _Group(group, epoch, room, self._report)
        try:
            sites = placed.start_actors(self._environment, deadline)
        except BaseException:
            self.stop(group, epoch, 0.0)
            raise
        ranks_on, cores = self._shares(group, sites)
        return tuple(
            Place(
                rank=rank,
                node=site.node,
                host=site.host,
                cores=cores[rank],
                ranks_on_host=ranks_on[rank],
            )
            for rank, site in enumerate(sites)
        )

    def _room(self, num_stages: int, ranks_per_stage: int) -> "Room":
        from cluster.ray_room import Room

        return Room(num_stages, ranks_per_stage, uses_gpus=self._uses_gpus)

    def _wait_for(self, rooms: Sequence["Room"], deadline: float) -> None:
        from cluster.ray_room import wait_for_rooms

        try:
            wait_for_rooms(rooms, deadline, self._patience_s, self._log)
        except BaseException:
            self._spare.clear()
            for room in rooms:
                room.give_back()
            raise

    def _shares(
        self, group: int, sites: Sequence["RankSite"]
    ) -> tuple[list[int], list[tuple[int, ...]]]:
        """For each rank of a group: how many ranks of all groups are on its node, and its share
        of the node's cores among them."""
        rooms = {number: placed.room for (number, _), placed in self._groups.items()} | self._spare
        ranks_on: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for number in sorted(rooms):
            for rank, node in enumerate(rooms[number].nodes()):
                ranks_on[node].append((number, rank))
        cores = []
        for rank, site in enumerate(sites):
            there = ranks_on[site.node]
            cores.append(deal_cores(site.cores, len(there))[there.index((group, rank))])
        return [len(ranks_on[site.node]) for site in sites], cores

    def start(self, launches: Sequence[WorkerLaunch], timeout_s: float) -> None:
        self._groups[launches[0].group, launches[0].epoch].run(launches, timeout_s)

    def stop(self, group: int, epoch: int, timeout_s: float) -> None:
        placed = self._groups.pop((group, epoch), None)
        if placed is not None:
            placed.end(timeout_s)

    def close(self, timeout_s: float) -> None:
        for group, epoch in list(self._groups):
            self.stop(group, epoch, min(timeout_s, CLOSE_WAIT_S))
        while self._spare:
            self._spare.popitem()[1].give_back()
        if self._is_open or not self._address:
            import ray

            ray.shutdown()
        self._is_open = False
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


class _Group:
    """The actors and the watcher of one epoch of a worker group, in their room."""

    def __init__(self, group: int, epoch: int, room: "Room", report: Report) -> None:
        self.room = room
        self._group, self._epoch, self._report = group, epoch, report
        self._actors: list[_Actor] = []
        self._runs: list[ObjectRef[int]] = []
        self._watcher: threading.Thread | None = None
        self._was_asked = False

    def start_actors(self, environment: Mapping[str, str], deadline: float) -> "list[RankSite]":
        """Start one actor for each rank, and ask each where it is.

        Raises:
            BackendError: one did not start, or cannot be reached.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from cluster.ray_rank import RankActor

        remote = ray.remote(RankActor)
        for rank in range(self.room.num_ranks):
            actor = remote.options(
                num_cpus=self.room.per_rank["CPU"],
                num_gpus=self.room.per_rank.get("GPU", 0),
                name=f"stoker-{secrets.token_hex(4)}-{self._group}.{self._epoch}.{rank}",
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self.room.group, placement_group_bundle_index=self.room.bundle_of(rank)
                ),
            ).remote()
            self._actors.append(cast("_Actor", actor))
        asked = [actor.site.remote(dict(environment)) for actor in self._actors]
        what = f"the {len(asked)} actors of group {self._group} to start"
        sites = _get(cast("list[ObjectRef[RankSite]]", asked), deadline, what)
        if problems := [site.problem for site in sites if site.problem]:
            raise BackendError("; ".join(problems))
        return sites

    def run(self, launches: Sequence[WorkerLaunch], timeout_s: float) -> None:
        """Tell each actor to be its rank; ranks that need a meeting place get rank 0's."""
        deadline = time.monotonic() + timeout_s
        rendezvous = launches[0].rendezvous
        needs_store = launches[0].runner.device == "cuda" or not rendezvous.is_one_host
        if needs_store and len(launches) > 1:
            host = rendezvous.hosts[0]
            listening = cast("list[ObjectRef[int]]", [self._actors[0].listen.remote(host)])
            port = _get(listening, deadline, "rank 0 to listen")[0]
            place = replace(rendezvous, store_host=host, store_port=port)
            launches = [replace(launch, rendezvous=place) for launch in launches]
        runs = [self._actors[launch.rank].run.remote(encode_launch(launch)) for launch in launches]
        self._runs = cast("list[ObjectRef[int]]", runs)
        ranks = [launch.rank for launch in launches]
        self._watcher = threading.Thread(target=self._watch, args=(ranks,), daemon=True)
        self._watcher.start()

    def _watch(self, ranks: Sequence[int]) -> None:
        """Report each run that ends, however it ends."""
        import ray

        rank_of = dict(zip(self._runs, ranks, strict=True))
        left = list(self._runs)
        while left:
            try:
                ended, left = ray.wait(left, num_returns=1, timeout=None)
            except Exception as error:  # Ray itself is gone, and with it every actor
                for run in left:
                    self._tell(rank_of[run], f"Ray is gone: {error}")
                return
            for run in ended:
                self._tell(rank_of[run], _how_it_ended(run))

    def _tell(self, rank: int, message: str) -> None:
        self._report(
            RankExit(
                group=self._group,
                epoch=self._epoch,
                rank=rank,
                message=message,
                was_asked=self._was_asked,
            )
        )

    def end(self, timeout_s: float) -> None:
        """Kill the actors at once: by then the engine has said stop, or nobody can."""
        import ray

        self._was_asked = True
        for actor in self._actors:
            with contextlib.suppress(Exception):  # it is gone already
                ray.kill(cast("ActorHandle[RankActor]", actor))
        self.room.give_back()
        if self._watcher is not None:
            self._watcher.join(max(timeout_s, CLOSE_WAIT_S))


def _knock(address: str) -> None:
    """Ray tries a dead address for minutes; a connection of our own says it at once."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S).close()


def _is_refused(address: str) -> bool:
    """Whether the Ray there takes us for a stranger, as a process of its own is told at once."""
    program = f"import ray; ray.init({address!r}, logging_level='ERROR')"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    end = threading.Timer(TOKEN_CHECK_S, process.kill)
    end.start()
    try:
        return any("InvalidAuthToken" in line for line in process.stderr)
    finally:
        end.cancel()
        process.kill()
        process.wait()
        process.stderr.close()


def _get(refs: "list[ObjectRef[_T]]", deadline: float, what: str) -> list[_T]:
    import ray

    try:
        return list(ray.get(refs, timeout=max(0.0, deadline - time.monotonic())))
    except ray.exceptions.GetTimeoutError as error:
        raise BackendError(f"waited in vain for {what}") from error
    except ray.exceptions.RayError as error:
        raise BackendError(f"while waiting for {what}: {error}") from error


def _how_it_ended(run: "ObjectRef[int]") -> str:
    import ray

    try:
        code = ray.get(run)
    except ray.exceptions.RayError as error:
        return f"the actor ended: {' '.join(str(error).split())}"
    return f"the actor exited with code {code}"
