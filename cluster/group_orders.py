"""What the worker groups ask for, done.

What their state machines and whoever changes them (`cluster.changes`) ask for is done at the back
desk, with workers and the supervisor; in the scheduler, which gives a group requests and takes them
back; and at the front desk, which takes requests while a group serves.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from cluster.back_desk import BackDesk
from cluster.changes import GroupChanges
from cluster.doctor.alike import Leader
from cluster.engine_launch import EngineLaunch
from cluster.front_desk import FrontDesk
from cluster.group_instructions import (
    Drain,
    LetLoad,
    Lose,
    Refuse,
    Retire,
    Serve,
    SizePool,
    Start,
    held_against,
    why_lost,
)
from cluster.groups import WorkerGroup
from cluster.lanes import Lane
from cluster.logs import EventLog
from cluster.messages.supervisor import GroupLost, GroupReady, RetireGroup, StartGroup, UseModel
from cluster.messages.workers import MayLoad, PoolSize
from cluster.recovery import Recoveries
from cluster.reload import Order, UseWeights
from cluster.shortage import Shortage
from scheduler.config import ModelLimits
from scheduler.errors import ConfigError
from scheduler.journal import Journal
from scheduler.scheduler import Scheduler
from scheduler.sequences import Sequence

RETRY_AFTER_S = 5.0
"""When to come again who is refused because groups are being restarted."""


class GroupOrders:
    """Follows them; so it has the scheduler, and a lane for each group that takes plans."""

    def __init__(
        self,
        launch: EngineLaunch,
        groups: Mapping[int, WorkerGroup],
        changes: GroupChanges,
        leader: Leader,
        back: BackDesk,
        front: FrontDesk,
        journal: Journal | None,
        log: EventLog,
    ) -> None:
        """
        Args:
            changes: is told of losses.
            leader: is told which checkpoint groups load.
            journal: of the scheduler; None: it keeps none.
        """
        self._launch = launch
        self._groups = groups
        self._changes = changes
        self._leader = leader
        self._back, self._front = back, front
        self._journal = journal
        self._log = log
        self.scheduler: Scheduler | None = None
        """Made when the first group says what the model is."""
        self.lanes: dict[int, Lane] = {}
        """By group."""
        self.recoveries = Recoveries()
        self.shortage = Shortage(launch.no_workers_s)

    def follow(self, instructions: Iterable[Order], now: float) -> None:
        """Do these, and what they bring about."""
        for instruction in instructions:
            if isinstance(instruction, UseWeights):
                self._leader.use(instruction.model_dir)
                self._back.tell_supervisor(UseModel(str(instruction.model_dir)))
                continue
            self.recoveries.follow(instruction, now)
            match instruction:
                case LetLoad(peers=peers):
                    for peer in peers:
                        self._back.send(peer, MayLoad())
                case SizePool(peers=peers, num_blocks=num_blocks):
                    for peer in peers:
                        self._back.send(peer, PoolSize(num_blocks))
                case Serve():
                    self._serve(instruction, now)
                case Lose():
                    self._lose(instruction, now)
                case Start(group=number, epoch=epoch):
                    self._back.tell_supervisor(StartGroup(number, epoch))
                case Drain(group=number, drains=drains):
                    self._drain(number, drains, now)
                case Retire():
                    self._retire(instruction, now)
                case Refuse(peer=peer, message=message):
                    self._back.refuse(peer, "stranger", message)

    def _serve(self, ready: Serve, now: float) -> None:
        group = self._groups[ready.group]
        limits = ModelLimits(vocab_size=group.vocab_size, max_model_len=group.max_model_len)
        try:
            scheduler = self._scheduler_for(limits)
            news = scheduler.add_group(ready.group, ready.epoch, ready.num_blocks, now)
        except ConfigError as error:
            self._log.info(  # of the news that end a group, `group_lost` is the first
                "rank_failed", group=ready.group, epoch=ready.epoch, rank=-1, step=0, error=error
            )
            self.follow(group.failed(ready.epoch, -1, str(error), reason="wrong", now=now), now)
            return
        self._front.queue(news)
        stages = self._launch.scheduler.num_stages
        answering = group.num_ranks // stages * (stages - 1)
        self.lanes[ready.group] = Lane(ready.epoch, group.peers, answering)
        self._log.info(
            "group_ready", group=ready.group, epoch=ready.epoch, num_blocks=ready.num_blocks
        )
        self._back.tell_supervisor(
            GroupReady(
                group=ready.group,
                epoch=ready.epoch,
                num_blocks=ready.num_blocks,
                start_s=group.start_s,
            )
        )
        self.shortage.ends()
        self._front.open(scheduler, now)

    def _scheduler_for(self, limits: ModelLimits) -> Scheduler:
        """The scheduler; all groups must serve the same model.

        Raises:
            ConfigError: this group serves another one.
        """
        if self.scheduler is None:
            self.scheduler = Scheduler(self._launch.scheduler, limits, self._journal)
        if self.scheduler.model != limits:
            raise ConfigError(
                f"this group serves a model with {limits}, the others one with "
                f"{self.scheduler.model}. Give every node the same checkpoint"
            )
        return self.scheduler

    def _drain(self, number: int, drains: bool, now: float) -> None:
        assert self.scheduler is not None
        self._log.info("group_draining" if drains else "group_stays", group=number)
        self._front.queue(self.scheduler.drain_group(number, now, drains=drains))

    def _retire(self, retired: Retire, now: float, failure: str = "") -> None:
        """Let a group go; what still ran there waits for another one.

        Args:
            failure: if it did not go in order, and a request may be the cause.
        """
        number, num_moved = retired.group, 0
        if self.lanes.pop(number, None) is not None:
            assert self.scheduler is not None
            num_moved = self.scheduler.groups[number].num_running
            self._take_back(self.scheduler, self._groups[number], failure, now)
        self._log.info(
            "group_retired",
            group=number,
            epoch=retired.epoch,
            num_moved=num_moved,
            comes_back=retired.comes_back,
        )
        self._back.dismiss(number, f"group {number} is not needed any more")
        self._back.tell_supervisor(RetireGroup(number, retired.epoch, retired.comes_back))

    def _lose(self, lost: Lose, now: float) -> None:
        """Take a group's sequences back; if nobody is left to compute them, end them."""
        if lost.retires:
            self._retire(Retire(lost.group, lost.epoch), now, held_against(lost))
            return
        group = self._groups[lost.group]
        lane = self.lanes.pop(lost.group, None)
        if lane is not None and not lost.step:
            lost = replace(lost, step=lane.step)
        why = why_lost(lost)
        moved: list[Sequence] = []
        if lane is not None:
            assert self.scheduler is not None
            moved = self.scheduler.groups[lost.group].sequences
            self._take_back(self.scheduler, group, held_against(lost), now)
            lost = replace(lost, restarts=group.restarts)
        self._log.error(
            "group_lost",
            group=lost.group,
            epoch=lost.epoch,
            rank=lost.rank,
            step=lost.step,
            reason=lost.reason,
            restarts=lost.restarts,
            num_moved=len(moved),
            error=lost.message,
        )
        if lane is not None or group.num_restarts:
            noticed_s = 0.0 if lane is None else lane.silent_s(now)
            self.recoveries.lost(lost, moved, noticed_s, now)
        self.follow(self._changes.lost(lost), now)
        self._back.dismiss(lost.group, f"group {lost.group} was lost: {lost.message}")
        self._back.tell_supervisor(
            GroupLost(
                group=lost.group,
                epoch=lost.epoch,
                message=lost.message,
                rank=lost.rank,
                step=lost.step,
                restarts=lost.restarts,
            )
        )
        if not self.lanes:
            self.shortage.begins(why, now)
        if not any(group.has_hope for group in self._groups.values()):
            self.end_waiting(now)

    def _take_back(
        self, scheduler: Scheduler, group: WorkerGroup, failure: str, now: float
    ) -> None:
        """The scheduler's part of a loss. A request that is found to be its cause has ended, and
        the group is not to blame."""
        num_before = scheduler.counters.poisoned
        self._front.queue(scheduler.lose_group(group.group, now, failure))
        if scheduler.counters.poisoned > num_before:
            self._log.warning("request_given_up", group=group.group, reason="poison")
            group.excuse()

    def end_waiting(self, now: float) -> None:
        """No group takes plans, and none did for too long, or none will: refuse who waits and who
        comes, until one does. Streams that have begun wait on while one may come."""
        has_hope = any(group.has_hope for group in self._groups.values())
        why = f"no worker group is left: {self.shortage.why}"
        if has_hope:
            why = (
                f"no worker group has taken requests for no_workers_s="
                f"{self._launch.no_workers_s:g}; the last one was lost: {self.shortage.why}"
            )
        self._front.lack_workers(why, RETRY_AFTER_S if has_hope else None, now)
        if self.scheduler is not None:
            self._front.queue(self.scheduler.fail_waiting(why, now, begun=not has_hope))
