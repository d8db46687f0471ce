"""The actors of one epoch of a worker group, in their room: started, watched, ended."""

import contextlib
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from msgspec.structs import replace

from cluster.backend import RankExit, Report, WorkerLaunch, encode_launch
from cluster.errors import BackendError
from cluster.loss_reasons import LossReason, reason_of_exit

if TYPE_CHECKING:  # Ray reads its settings from the environment when it is imported
    from ray import ObjectRef
    from ray.actor import ActorHandle

    from cluster.ray_rank import RankActor, RankSite
    from cluster.ray_room import Room

CLOSE_WAIT_S = 5.0
"""For killed actors to be reported."""

_T = TypeVar("_T")


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


class RankGroup:
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
                    self._tell(rank_of[run], f"Ray is gone: {error}", "node")
                return
            for run in ended:
                self._tell(rank_of[run], *_how_it_ended(run))

    def _tell(self, rank: int, message: str, reason: LossReason) -> None:
        self._report(
            RankExit(
                group=self._group,
                epoch=self._epoch,
                rank=rank,
                message=message,
                was_asked=self._was_asked,
                reason=reason,
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


def _get(refs: "list[ObjectRef[_T]]", deadline: float, what: str) -> list[_T]:
    import ray

    try:
        return list(ray.get(refs, timeout=max(0.0, deadline - time.monotonic())))
    except ray.exceptions.GetTimeoutError as error:
        raise BackendError(f"waited in vain for {what}") from error
    except ray.exceptions.RayError as error:
        raise BackendError(f"while waiting for {what}: {error}") from error


def _how_it_ended(run: "ObjectRef[int]") -> tuple[str, LossReason]:
    import ray

    try:
        code = ray.get(run)
    except ray.exceptions.RayError as error:
        text = " ".join(str(error).split())
        return f"the actor ended: {text}", reason_in(text)
    return f"the actor exited with code {code}", reason_of_exit(code)


def reason_in(text: str) -> LossReason:
    """What Ray says of an actor's end: it has no other way to tell these apart."""
    if "its node has died" in text or "node was terminated" in text:
        return "node"
    return "ended" if "was killed by `ray.kill`" in text else "died"
