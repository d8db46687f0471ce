"""Worker processes as Ray actors: placed, started and watched by Ray, which is in no step's path.

One placement group per worker group, one actor per rank; an actor hosts the same `WorkerHost`
as a plain process. Without an address a Ray of our own is started on this host, with every
socket on loopback, its own token, and its files in a folder that `close` removes. Every wait
on Ray has a limit and says what it waits for.
"""

import contextlib
import logging
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

from cluster.backend import Place, RankExit, Report, WorkerLaunch, decode_launch, encode_launch
from cluster.cores import deal_cores
from cluster.errors import BackendError
from cluster.logs import EventLog, show_events
from cluster.worker_host import WorkerHost
from cluster.worker_main import build_model_runner, settle_on_cores

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

OBJECT_STORE_BYTES = 80 << 20
"""Ray's least is 75 MiB. Nothing of ours goes through its object store."""

ROOM_CHECK_S = 2.0
"""After this long without room, and again and again, see whether there could ever be some."""

KNOCK_S = 5.0
"""For a Ray elsewhere to take a connection."""

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


class RankSite(Struct, frozen=True):
    """Where an actor found itself."""

    node: str
    host: str
    cores: tuple[int, ...]


class RankActor:
    """The body of one actor: a `WorkerHost` in a process that Ray started."""

    def __init__(self) -> None:
        os.dup2(2, 1)  # what workers print belongs to the log, not to the supervisor's output
        self._listener: socket.socket | None = None

    def site(self) -> RankSite:
        import ray

        context = ray.get_runtime_context()
        cores = tuple(sorted(os.sched_getaffinity(0)))
        host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        return RankSite(context.get_node_id(), host, cores)

    def listen(self, host: str) -> int:
        """Open the group's meeting place in rank 0's process; its port."""
        self._listener = socket.create_server((host, 0))
        return int(self._listener.getsockname()[1])

    def run(self, launch_json: bytes) -> int:
        """Be the rank until its end; the exit code that a process would have."""
        began = time.monotonic()
        launch = decode_launch(launch_json)
        if self._listener is not None:
            place = replace(launch.rendezvous, listener_fd=self._listener.detach())
            launch = replace(launch, rendezvous=place)
        show_events(f"worker {launch.name}", launch.log_level)
        settle_on_cores(launch)
        log = EventLog("worker", group=launch.group, epoch=launch.epoch, rank=launch.rank)
        return WorkerHost(launch, build_model_runner, log, began=began).run()


class RayBackend:
    """Actors of this driver. `num_ranks` ranks of all groups share `cores` of this host."""

    def __init__(
        self,
        report: Report,
        *,
        num_ranks: int,
        cores: Sequence[int],
        log: EventLog,
        address: str = "",
        uses_gpus: bool = False,
    ) -> None:
        self._report = report
        self._num_ranks = num_ranks
        self._cores = tuple(cores)
        self._log = log
        self._address = address
        self._uses_gpus = uses_gpus
        self._folder: Path | None = None
        self._groups: dict[tuple[int, int], _Group] = {}

    def open(self, timeout_s: float) -> None:
        """Connect to the Ray at `address`, or start one here."""
        own = {} if self._address else _OWN_CLUSTER
        for name, value in {**_EVERY_CLUSTER, **own}.items():
            os.environ[name] = value
        started = time.monotonic()
        if self._address:
            self._connect()
        else:
            self._start_own()
        self._log.info("ray_ready", seconds=time.monotonic() - started, own=not self._address)

    def _connect(self) -> None:
        import ray

        try:
            _knock(self._address)
            ray.init(self._address, log_to_driver=True, logging_level=logging.ERROR)
        except (OSError, ValueError, RuntimeError) as error:
            raise BackendError(
                f"no Ray cluster answers at {self._address}: {error}. Start one with "
                "`ray start --head`, or leave the address away to have one made here"
            ) from error

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

    def place(
        self, group: int, epoch: int, num_stages: int, ranks_per_stage: int, timeout_s: float
    ) -> tuple[Place, ...]:
        num_ranks = num_stages * ranks_per_stage
        deadline = time.monotonic() + timeout_s
        placed = _Group(group, epoch, self._report)
        self._groups[group, epoch] = placed
        try:
            placed.take_room(num_ranks, self._uses_gpus, deadline)
            sites = placed.start_actors(num_ranks, self._uses_gpus, deadline)
        except BaseException:
            self.stop(group, epoch, 0.0)
            raise
        shares = self._cores_of(group, sites)
        return tuple(
            Place(rank=rank, node=site.node, host=site.host, cores=shares[rank])
            for rank, site in enumerate(sites)
        )

    def _cores_of(self, group: int, sites: Sequence[RankSite]) -> list[tuple[int, ...]]:
        """Each rank's cores: a share of its node's among the ranks that we know of there."""
        on_one_node = len({site.node for site in sites}) == 1
        if not self._cores:
            return [()] * len(sites)
        if on_one_node and not self._address:
            shares = deal_cores(self._cores, self._num_ranks)
            first = group * len(sites)
            return [shares[(first + rank) % len(shares)] for rank in range(len(sites))]
        ranks_on: dict[str, list[int]] = defaultdict(list)
        for rank, site in enumerate(sites):
            ranks_on[site.node].append(rank)
        dealt: list[tuple[int, ...]] = [()] * len(sites)
        for ranks in ranks_on.values():
            for rank, share in zip(
                ranks, deal_cores(sites[ranks[0]].cores, len(ranks)), strict=True
            ):
                dealt[rank] = share
        return dealt

    def start(self, launches: Sequence[WorkerLaunch], timeout_s: float) -> None:
        self._groups[launches[0].group, launches[0].epoch].run(launches, timeout_s)

    def stop(self, group: int, epoch: int, timeout_s: float) -> None:
        placed = self._groups.pop((group, epoch), None)
        if placed is not None:
            placed.end(timeout_s)

    def close(self, timeout_s: float) -> None:
        for group, epoch in list(self._groups):
            self.stop(group, epoch, min(timeout_s, CLOSE_WAIT_S))
        import ray

        ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


class _Group:
    """The placement group, the actors and the watcher of one epoch of a worker group."""

    def __init__(self, group: int, epoch: int, report: Report) -> None:
        self._group, self._epoch, self._report = group, epoch, report
        self._room: PlacementGroup | None = None
        self._actors: list[_Actor] = []
        self._runs: list[ObjectRef[int]] = []
        self._watcher: threading.Thread | None = None
        self._was_asked = False

    def take_room(self, num_ranks: int, uses_gpus: bool, deadline: float) -> None:
        from ray.util.placement_group import placement_group

        bundle = {"CPU": 1.0, "GPU": 1.0} if uses_gpus else {"CPU": 1.0}
        self._room = placement_group([bundle] * num_ranks, strategy="PACK")
        while not self._room.wait(max(0.0, min(ROOM_CHECK_S, deadline - time.monotonic()))):
            never = not _could_ever_fit(bundle, num_ranks)
            if never or time.monotonic() >= deadline:
                raise BackendError(_no_room(self._group, num_ranks, bundle, self._room))

    def start_actors(self, num_ranks: int, uses_gpus: bool, deadline: float) -> list[RankSite]:
        """Start one actor in each bundle, and ask each where it is."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        room = self._room
        assert room is not None, "take_room comes first"
        remote = ray.remote(RankActor)
        for rank in range(num_ranks):
            actor = remote.options(
                num_cpus=1,
                num_gpus=1 if uses_gpus else 0,
                name=f"stoker-{secrets.token_hex(4)}-{self._group}.{self._epoch}.{rank}",
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    room, placement_group_bundle_index=rank
                ),
            ).remote()
            self._actors.append(cast("_Actor", actor))
        return self._sites(deadline, f"the {num_ranks} actors of group {self._group} to start")

    def run(self, launches: Sequence[WorkerLaunch], timeout_s: float) -> None:
        """Tell each actor to be its rank; ranks that need a meeting place get rank 0's."""
        deadline = time.monotonic() + timeout_s
        rendezvous = launches[0].rendezvous
        needs_store = launches[0].runner.device == "cuda" or not rendezvous.is_one_host
        if needs_store and len(launches) > 1:
            host = self._sites(deadline, "the ranks' addresses")[0].host
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
        from ray.util.placement_group import remove_placement_group

        self._was_asked = True
        for actor in self._actors:
            with contextlib.suppress(Exception):  # it is gone already
                ray.kill(cast("ActorHandle[RankActor]", actor))
        if self._room is not None:
            with contextlib.suppress(Exception):  # Ray is gone already
                remove_placement_group(self._room)
        if self._watcher is not None:
            self._watcher.join(max(timeout_s, CLOSE_WAIT_S))

    def _sites(self, deadline: float, what: str) -> list[RankSite]:
        asked = [actor.site.remote() for actor in self._actors]
        return _get(cast("list[ObjectRef[RankSite]]", asked), deadline, what)


def _knock(address: str) -> None:
    """Ray tries a dead address for minutes; a connection of our own says it at once."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S).close()


def _get(refs: "list[ObjectRef[_T]]", deadline: float, what: str) -> list[_T]:
    import ray

    try:
        return list(ray.get(refs, timeout=max(0.0, deadline - time.monotonic())))
    except ray.exceptions.GetTimeoutError as error:
        raise BackendError(f"waited in vain for {what}") from error
    except ray.exceptions.RayError as error:
        raise BackendError(f"while waiting for {what}: {error}") from error


def _resources(kind: str) -> dict[str, float]:
    """What the cluster has of each resource, in all or `available`."""
    import ray

    asked = ray.available_resources if kind == "available" else ray.cluster_resources
    return dict(asked())  # type: ignore[no-untyped-call]


def _could_ever_fit(bundle: dict[str, float], num_ranks: int) -> bool:
    """Whether the cluster has enough in all, be it in use now."""
    total = _resources("all")
    return all(total.get(kind, 0.0) >= amount * num_ranks for kind, amount in bundle.items())


def _no_room(group: int, num_ranks: int, bundle: dict[str, float], room: "PlacementGroup") -> str:
    """What was asked, what is free, and what each node has."""
    import ray
    from ray.util import placement_group_table

    free, total = _resources("available"), _resources("all")
    asked = ", ".join(f"{amount * num_ranks:g} {kind}" for kind, amount in bundle.items())
    there = ", ".join(
        f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind} free" for kind in bundle
    )
    state = placement_group_table(room).get("stats", {}).get("scheduling_state", "unknown")
    lines = [
        f"no room for group {group}: asked for {asked} ({num_ranks} ranks), there are {there} "
        f"(Ray says {state}). Lower tensor_parallel_size or num_groups, add nodes, or use "
        "backend=local, which lets ranks share cores. Nodes:"
    ]
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        has = ", ".join(f"{node['Resources'].get(kind, 0):g} {kind}" for kind in bundle)
        alive = "" if node["Alive"] else " (dead)"
        lines.append(f"  {node['NodeManagerAddress']} {node['NodeID'][:8]}: {has}{alive}")
    return "\n".join(lines)


def _how_it_ended(run: "ObjectRef[int]") -> str:
    import ray

    try:
        code = ray.get(run)
    except ray.exceptions.RayError as error:
        return f"the actor ended: {' '.join(str(error).split())}"
    return f"the actor exited with code {code}"
