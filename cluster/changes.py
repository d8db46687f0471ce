"""What may be changed of the worker groups while the cluster serves, and who does it.

The group desk asks here when a client wants a change, and whenever time has passed; the
instructions of the groups' state machines that come back are followed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from cluster.errors import ModelError
from cluster.group_instructions import Lose
from cluster.groups import WorkerGroup
from cluster.logs import EventLog
from cluster.messages.changes import (
    Change,
    Changed,
    DrainNode,
    ModelReloaded,
    NodeDrained,
    ReloadModel,
    Scaled,
    ScaleGroups,
)
from cluster.node_drains import NodeDrains
from cluster.reload import Order, Reload
from cluster.scaling import ScaleLimits, Scaling
from cluster.served_model import Checkpoints
from scheduler.scheduler import Scheduler

Outcome: TypeAlias = tuple[Changed, Sequence[Order]]
"""What a client is answered, and what the groups have to do."""

NOT_SERVING = "the cluster is starting or stopping; ask again when it serves"

ONE_NODE = (
    "every rank of this cluster has to be on this host, so nothing can leave it. End it with "
    "SIGTERM instead, or serve from a Ray cluster of several nodes (--ray-address)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeLimits:
    """What of it this cluster can do."""

    scale: ScaleLimits
    is_one_host: bool = False
    """Whether there is no other node that ranks could go to."""


class GroupChanges:
    """The number of groups, and the nodes on which they may be."""

    def __init__(
        self,
        limits: ChangeLimits,
        groups: dict[int, WorkerGroup],
        new_group: Callable[[int, float], WorkerGroup],
        why_no_room: Callable[[int], str],
        log: EventLog,
        model_dir: Path,
        checkpoints: Checkpoints | None,
        drained_nodes: Iterable[str] = (),
    ) -> None:
        """
        Args:
            groups: the engine's, of which this adds to.
            new_group: makes one of a number, at a time.
            why_no_room: for so many more groups; empty if there is.
            model_dir: that the groups have.
            checkpoints: that they may have instead; None: no others.
            drained_nodes: on which none may be.
        """
        self._limits, self._log = limits, log
        drained = set(drained_nodes)
        self._scaling = Scaling(limits.scale, groups, new_group, why_no_room, drained)
        self._drains = NodeDrains(groups, self._scaling, drained)
        self._reload = Reload(groups, model_dir)
        self._checkpoints = checkpoints
        self._wants_renewal = self._renews = False

    @property
    def drained_nodes(self) -> tuple[str, ...]:
        """That take no groups."""
        return self._drains.nodes

    @property
    def next_deadline(self) -> float | None:
        deadlines = (self._scaling.next_deadline, self._drains.next_deadline)
        return min((at for at in deadlines if at is not None), default=None)

    def keep_time(self, scheduler: Scheduler, now: float) -> list[Order]:
        return [
            *self._drains.keep_time(now),
            *self._reload.keep_time(now),
            *self._renewal(now),
            *self._scaling.keep_time(scheduler, now),
        ]

    def renew(self) -> None:
        """Let every group leave and come back with what it has, after a reload that runs."""
        self._wants_renewal = True

    def renewed(self) -> str | None:
        """Once, when that is over: why it was given up, or empty. None: it runs, or none does."""
        if not self._renews or self._reload.is_running:
            return None
        self._renews = False
        return self._reload.failure

    def _renewal(self, now: float) -> list[Order]:
        if not self._wants_renewal or self._reload.is_running:
            return []
        self._wants_renewal, self._renews = False, True
        return self._reload.begin(self._reload.model_dir, now)

    def lost(self, lost: Lose) -> list[Order]:
        """A group was lost; what has to be before its processes have ended."""
        was_failing = bool(self._reload.failure)
        found = self._reload.lost(lost)
        if self._reload.failure and not was_failing:
            self._log.error("reload_failed", error=self._reload.failure)
        return found

    def ask(self, change: Change, is_serving: bool, now: float) -> Outcome:
        """Begin what a client wants, or say why not."""
        match change:
            case ScaleGroups():
                return self._scale(change, is_serving, now)
            case DrainNode():
                return self._drain(change, is_serving, now)
            case ReloadModel():
                return self._begin_reload(change, is_serving, now)

    def _scale(self, change: ScaleGroups, is_serving: bool, now: float) -> Outcome:
        refusal = self._scaling.why_not(change.num_groups) if is_serving else NOT_SERVING
        found: Sequence[Order] = ()
        if not refusal:
            before = self._scaling.num_wanted
            self._log.info("scaling", num_groups=change.num_groups, before=before)
            found = self._scaling.change(change.num_groups, now)
        answer = Scaled(
            num_groups=self._scaling.num_wanted,
            is_automatic=self._scaling.is_automatic,
            refusal=refusal,
        )
        return answer, found

    def _drain(self, change: DrainNode, is_serving: bool, now: float) -> Outcome:
        node = change.node
        refusal = ONE_NODE if self._limits.is_one_host else "" if is_serving else NOT_SERVING
        found: Sequence[Order] = ()
        if not refusal and (node in self.drained_nodes) == change.undo:
            self._log.info("node_drained", node=node, undo=change.undo)
            found = self._drains.undo(node, now) if change.undo else self._drains.drain(node, now)
        answer = NodeDrained(
            nodes=self.drained_nodes,
            num_leaving=self._drains.num_leaving(node),
            waits_for="" if change.undo else self._drains.waits_for(node),
            refusal=refusal,
        )
        return answer, found

    def _begin_reload(self, change: ReloadModel, is_serving: bool, now: float) -> Outcome:
        refusal = ""
        found: Sequence[Order] = ()
        if not change.only_asks:
            try:
                found = self._reload_to(change.model, is_serving, now)
            except ModelError as error:
                refusal = str(error)
        answer = ModelReloaded(
            model_dir=str(self._reload.model_dir),
            is_running=self._reload.is_running,
            num_groups=self._reload.num_groups,
            num_done=self._reload.num_done,
            failure=self._reload.failure,
            refusal=refusal,
        )
        return answer, found

    def _reload_to(self, model: str, is_serving: bool, now: float) -> list[Order]:
        """Begin it.

        Raises:
            ModelError: it cannot be, and why.
        """
        if not is_serving:
            raise ModelError(NOT_SERVING)
        if self._reload.is_running:
            raise ModelError(
                f"{self._reload.num_done} of {self._reload.num_groups} groups have come back from "
                "the reload before this one; ask again when all have"
            )
        if self._checkpoints is None:
            raise ModelError("the checkpoint that is served could not be read, so none compares")
        found = self._checkpoints.find(model, self._reload.model_dir)
        self._log.info("reloading", model_dir=found.model_dir, before=self._reload.model_dir)
        return self._reload.begin(found.model_dir, now)
