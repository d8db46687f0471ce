"""The worker groups, and what happens to them: workers come and fail, time passes, clients wish.

Each group's life is a state machine (`cluster.groups`), which is told of it here; what it asks for
is done by `cluster.group_orders`.
"""

import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from cluster.back_desk import (
    BackDesk,
    GroupEvent,
    WorkerAllocated,
    WorkerCame,
    WorkerGreeted,
    WorkerLeft,
)
from cluster.changes import ChangeLimits, GroupChanges
from cluster.doctor.alike import Leader
from cluster.engine_launch import EngineLaunch, GroupEpoch
from cluster.front_desk import FrontDesk
from cluster.group_orders import GroupOrders
from cluster.groups import RestartPolicy, WorkerGroup
from cluster.lanes import Lane
from cluster.logs import EventLog
from cluster.loss_reasons import LossReason
from cluster.messages.changes import Change, Changed
from cluster.messages.supervisor import AvoidNodes, GroupsRenewed, GroupStopped, RenewGroups
from cluster.messages.workers import NodeFacts, RankPhase, WorkerFailed, WorkerGreeting, WorkerHello
from cluster.recovery import Recoveries
from cluster.scaling import ScaleLimits, why_no_room
from cluster.served_model import Checkpoints
from scheduler.journal import Journal
from scheduler.scheduler import Scheduler


class GroupDesk:
    """The groups, and of each one that takes plans its lane."""

    def __init__(
        self,
        launch: EngineLaunch,
        back: BackDesk,
        front: FrontDesk,
        *,
        journal: Journal | None,
        now: float,
        log: EventLog,
        facts: Callable[[Path], NodeFacts] | None = None,
        free_bytes: Callable[[], int] | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        """
        Args:
            journal: of the scheduler; None: it keeps none.
            facts: of this host and a model's folder, which those of all workers must equal; None:
                nothing must.
            free_bytes: of this host's memory, for groups that are added; None: nobody asks.
            checkpoints: whose weights groups may load instead; None: no others.
        """
        self._launch = launch
        self._back, self._front = back, front
        self._log = log
        self._ask_free_bytes = free_bytes
        self._groups = self._first_groups(launch, now)
        scale = ScaleLimits(
            num_groups=launch.num_groups,
            min_groups=launch.min_groups,
            max_groups=launch.max_groups,
            drain_s=launch.drain_s,
        )
        model_dir = Path(launch.model_dir)
        self._changes = GroupChanges(
            ChangeLimits(scale=scale, is_one_host=launch.is_one_host),
            self._groups,
            self._new_group,
            self._why_no_room,
            log,
            model_dir,
            checkpoints,
            launch.drained_nodes,
        )
        self._leader = Leader(facts, model_dir)
        self._orders = GroupOrders(
            launch, self._groups, self._changes, self._leader, back, front, journal, log
        )

    def _first_groups(self, launch: EngineLaunch, now: float) -> dict[int, WorkerGroup]:
        """Those that the engine before had, if there was one."""
        if not launch.epochs:
            return {n: self._new_group(n, now) for n in range(launch.num_groups)}
        return {it.group: self._new_group(it.group, now, it) for it in launch.epochs}

    def _new_group(self, group: int, now: float, before: GroupEpoch | None = None) -> WorkerGroup:
        return WorkerGroup(
            group,
            self._launch.num_ranks,
            start_timeout_s=self._launch.start_timeout_s,
            policy=RestartPolicy(
                max_restarts=self._launch.max_restarts,
                longest_pause_s=self._launch.longest_restart_pause_s,
            ),
            now=now,
            num_stages=self._launch.scheduler.num_stages,
            before=before,
            takeover_s=self._launch.takeover_s,
        )

    def _why_no_room(self, num_more: int) -> str:
        stats = () if self.scheduler is None else self.scheduler.stats().groups
        if self._ask_free_bytes is None:
            return ""
        host, free_bytes = socket.gethostname(), self._ask_free_bytes()
        return why_no_room(num_more, self._groups.values(), stats, host, free_bytes)

    # --- what is asked of it ---

    @property
    def groups(self) -> Mapping[int, WorkerGroup]:
        return self._groups

    @property
    def lanes(self) -> Mapping[int, Lane]:
        """Of the groups that take plans."""
        return self._orders.lanes

    @property
    def scheduler(self) -> Scheduler | None:
        """None: no group has said yet what the model is."""
        return self._orders.scheduler

    @property
    def recoveries(self) -> Recoveries:
        return self._orders.recoveries

    @property
    def drained_nodes(self) -> tuple[str, ...]:
        """That take no groups."""
        return self._changes.drained_nodes

    @property
    def next_deadline(self) -> float | None:
        """When `keep_time` must be called next."""
        deadlines = [group.next_deadline for group in self._groups.values()]
        deadlines += [self._step_deadline(lane) for lane in self.lanes.values()]
        deadlines += [self._changes.next_deadline, self._orders.shortage.next_deadline]
        return min((at for at in deadlines if at is not None), default=None)

    def _step_deadline(self, lane: Lane) -> float | None:
        return lane.deadline(self._launch.step_timeout_s)

    def change(self, wish: Change, is_serving: bool, now: float) -> Changed:
        """Change what a client wants changed of the groups, or say why not."""
        before = self.drained_nodes
        answer, instructions = self._changes.ask(wish, is_serving, now)
        if self.drained_nodes != before:  # before a group starts elsewhere
            self._back.tell_supervisor(AvoidNodes(self.drained_nodes))
        self._orders.follow(instructions, now)
        return answer

    # --- events ---

    def keep_time(self, is_stopping: bool, now: float) -> None:
        """Time has passed: for a start, a step, a pause, or those who wait for a group."""
        for group in self._groups.values():
            self._orders.follow(group.tick(now), now)
        for number, lane in list(self.lanes.items()):
            deadline = self._step_deadline(lane)
            if deadline is not None and now >= deadline:
                why = (
                    f"step {lane.step} was not answered within step_timeout_s="
                    f"{self._launch.step_timeout_s:g}"
                )
                self.fail(number, lane.epoch, -1, why, now, reason="hung", step=lane.step)
        if self.scheduler is not None:
            self._front.queue(self.scheduler.expire(now))
            if not is_stopping:
                self._orders.follow(self._changes.keep_time(self.scheduler, now), now)
                if (failure := self._changes.renewed()) is not None:
                    self._back.tell_supervisor(GroupsRenewed(failure))
        if self._orders.shortage.runs_out(now):
            self._orders.end_waiting(now)
        for recovery in self.recoveries.look(self.scheduler, now):
            self._log.info("group_recovered", **recovery.fields())

    def take(self, event: GroupEvent, now: float) -> None:
        """Something has happened to a group, or one of its workers says something."""
        match event:
            case WorkerGreeted(peer=peer, greeting=greeting):
                self._greet(peer, greeting, now)
            case RankPhase():
                self._moved(event)
            case WorkerCame(peer=peer, hello=hello):
                self._came(peer, hello, now)
            case WorkerAllocated(peer=peer, group=number):
                self._orders.follow(self._groups[number].ready(peer, now), now)
            case WorkerLeft(peer=peer, group=number):
                self._orders.follow(self._groups[number].left(peer, now), now)
            case WorkerFailed(group=number, epoch=epoch, rank=rank, message=why, step=step):
                self.fail(number, epoch, rank, why, now, reason=event.reason, step=step)
            case GroupStopped(group=number, epoch=epoch):
                self._stopped(number, epoch, now)
            case RenewGroups():
                self._changes.renew()

    def _greet(self, peer: bytes, greeting: WorkerGreeting, now: float) -> None:
        group = self._groups.get(greeting.group)
        if group is None:
            self._back.refuse(peer, "stranger", f"there is no group {greeting.group}")
            return
        difference = self._leader.difference(greeting.facts)
        self._orders.follow(group.greet(peer, greeting, difference, now), now)

    def _moved(self, phase: RankPhase) -> None:
        group = self._groups.get(phase.group)
        if group is not None and group.moved(phase):
            self._back.tell_supervisor(phase)

    def _came(self, peer: bytes, hello: WorkerHello, now: float) -> None:
        group = self._groups.get(hello.group)
        if group is None:
            self._back.refuse(peer, "stranger", f"there is no group {hello.group}")
            return
        self._log.info(
            "worker_taken_over" if hello.is_loaded else "worker_loaded",
            group=hello.group,
            epoch=hello.epoch,
            rank=hello.rank,
            host=hello.host,
            pid=hello.pid,
            num_blocks=hello.capacity.num_blocks,
        )
        self._orders.follow(group.hello(peer, hello, now), now)

    def fail(
        self,
        number: int,
        epoch: int,
        rank: int,
        message: str,
        now: float,
        *,
        reason: LossReason,
        step: int = 0,
    ) -> None:
        """A rank (-1: the group) cannot go on, or is not waited for any longer."""
        if number not in self._groups:
            self._back.drop(f"news of group {number}, which does not exist")
            return
        self._log.info(  # of the news that end a group, `group_lost` is the first
            "rank_failed", group=number, epoch=epoch, rank=rank, step=step, error=message
        )
        failed = self._groups[number].failed(
            epoch, rank, message, reason=reason, step=step, now=now
        )
        self._orders.follow(failed, now)

    def _stopped(self, number: int, epoch: int, now: float) -> None:
        group = self._groups.get(number)
        if group is None:
            return
        if epoch == group.epoch:
            self.recoveries.fenced(number, now)
        self._orders.follow(group.stopped(epoch, now), now)
