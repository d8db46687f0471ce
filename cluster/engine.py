"""The engine core's loop: receive, plan, dispatch, apply, reply.

One thread owns both sockets and the scheduler. It sleeps until a message or a deadline comes,
so that an idle engine uses no CPU. What it may do is decided elsewhere: by the scheduler, by
the groups' state machines, and by the front desk for clients.
"""

import signal
import socket
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from msgspec.structs import replace as replace_fields

from cluster.back_desk import (
    BackDesk,
    SupervisorLeft,
    WorkerAllocated,
    WorkerAnswered,
    WorkerCame,
    WorkerGreeted,
    WorkerLeft,
)
from cluster.changes import NOT_SERVING, ChangeLimits, GroupChanges
from cluster.chaos_desk import ChaosDesk
from cluster.doctor.alike import why_not_alike
from cluster.engine_launch import EngineLaunch, GroupEpoch
from cluster.engine_metrics import build_metrics
from cluster.errors import PeerGone
from cluster.front_desk import FrontDesk
from cluster.frontend.tokenizer_files import TokenizerFiles
from cluster.groups import (
    Drain,
    LetLoad,
    Lose,
    LossReason,
    Refuse,
    RestartPolicy,
    Retire,
    Serve,
    SizePool,
    Start,
    WorkerGroup,
    why_lost,
)
from cluster.lanes import Lane
from cluster.links import EngineLinks
from cluster.logs import EventLog
from cluster.messages import (
    AvoidNodes,
    BeginUpgrade,
    Change,
    Changed,
    ClusterUpgraded,
    EngineMetrics,
    FaultInjected,
    GenerationDefaults,
    GroupLost,
    GroupReady,
    GroupsRenewed,
    GroupStopped,
    HandOver,
    InjectFault,
    MayLoad,
    NodeFacts,
    PoolSize,
    RankPhase,
    RenewGroups,
    RetireGroup,
    ServerInfo,
    Shutdown,
    StartGroup,
    StartPhases,
    Status,
    UpgradeCluster,
    UpgradeNews,
    UseModel,
    WorkerFailed,
    WorkerGreeting,
    WorkerHello,
)
from cluster.recovery import Recoveries
from cluster.reload import Order, UseWeights
from cluster.scaling import ScaleLimits, why_no_room
from cluster.served_model import Checkpoints
from cluster.shortage import Shortage
from cluster.status import build_status
from cluster.step_feed import StepFeed
from cluster.wire import FROM_ENGINE, PROTOCOL_VERSION
from scheduler.config import ModelLimits
from scheduler.errors import ConfigError, ProtocolError
from scheduler.journal import Journal
from scheduler.meter import Meter
from scheduler.outbox import Outgoing
from scheduler.plan import StepPlan, StepResult
from scheduler.request import Finish
from scheduler.scheduler import Scheduler
from scheduler.sequences import Sequence

RETRY_AFTER_S = 5.0
"""When to come again who is refused because groups are being restarted."""

STUCK_WAIT_S = 0.01
"""Pause before planning again when there was work but no plan."""


class Engine:
    """Serves until it is told to stop, or its supervisor is gone."""

    def __init__(
        self,
        launch: EngineLaunch,
        links: EngineLinks,
        *,
        tokenizer: TokenizerFiles | None,
        end_ids: tuple[int, ...],
        defaults: GenerationDefaults,
        journal: Journal | None,
        signals: Callable[[], list[signal.Signals]],
        clock: Callable[[], float],
        log: EventLog,
        facts: Callable[[Path], NodeFacts] | None = None,
        free_bytes: Callable[[], int] | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        """
        Args:
            facts: of this host and a model's folder, which those of all workers must equal; None:
                nothing must.
            free_bytes: of this host's memory, for groups that are added; None: nobody asks.
            checkpoints: whose weights groups may load instead; None: no others.
        """
        self._launch = launch
        self._links = links
        self._end_ids, self._defaults = end_ids, defaults
        self._tokenizer_digest = "" if tokenizer is None else tokenizer.digest
        self._journal = journal
        self._signals = signals
        self._clock = clock
        self._log = log
        self._ask_facts = facts
        self._ask_free_bytes = free_bytes
        self._facts: NodeFacts | None = None
        self._began = clock()
        self._start_s: dict[str, float] = {}
        """Seconds of each phase of the start, once it is over."""
        self._back = BackDesk(links.back, launch.engine_id, launch.key, log)
        self._chaos = ChaosDesk(launch.allow_chaos, self._back.send, log)
        self._steps = StepFeed(self._began)
        self._front = FrontDesk(
            links.front,
            tokenizer,
            self.status,
            self.metrics,
            self.change,
            self._ask_upgrade,
            self._inject,
            log,
            self._steps,
        )
        self._scheduler: Scheduler | None = None
        """Made when the first group says what the model is."""
        self._groups = self._first_groups(launch)
        scale = ScaleLimits(
            num_groups=launch.num_groups,
            min_groups=launch.min_groups,
            max_groups=launch.max_groups,
            drain_s=launch.drain_s,
        )
        self._changes = GroupChanges(
            ChangeLimits(scale=scale, is_one_host=launch.is_one_host),
            self._groups,
            self._new_group,
            self._why_no_room,
            log,
            Path(launch.model_dir),
            checkpoints,
            launch.drained_nodes,
        )
        self._lanes: dict[int, Lane] = {}
        self._recoveries = Recoveries()
        self._shortage = Shortage(launch.no_workers_s)
        self._news: list[Outgoing] = []
        self._next_turned_away = 1
        """Connections of which the log speaks next."""
        self._num_metric_errors = 0
        """Of which the log has spoken."""
        self._stop_at: float | None = None
        self._stop_message = ""
        self._hands_over = False
        """Whether another engine follows at once."""
        self._upgrade = UpgradeNews(phase="idle")
        """What the supervisor has said last."""

    def _first_groups(self, launch: EngineLaunch) -> dict[int, WorkerGroup]:
        """Those that the engine before had, if there was one."""
        if not launch.epochs:
            return {n: self._new_group(n, self._began) for n in range(launch.num_groups)}
        return {it.group: self._new_group(it.group, self._began, it) for it in launch.epochs}

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

    # --- the loop ---

    def run(self) -> None:
        """Serve until stopped. One thread owns both sockets and the scheduler."""
        while not self._is_done():
            self._links.wait(self._idle_wait_s())
            if signals := self._signals():
                self.stop(f"the engine received {signals[0].name}")
            now = self._clock()
            self._receive(now)  # first the workers, who must not wait
            self._keep_time(now)  # by what has come: we may have been stopped for a while
            self._dispatch(now)
            self._flush(now)
            self._front.receive(now)
            self._note_turned_away()
            self._dispatch(now)
            self._flush(now)
        self._end()

    def stop(self, message: str, drain_s: float = 0.0) -> None:
        """Take no more requests; end when the running ones have, or after `drain_s`."""
        now = self._clock()
        if self._stop_at is None:
            self._log.info("engine_stopping", reason=message, drain_s=drain_s)
            self._stop_message = message
            self._front.close(message, drain_s, now)
        self._stop_at = min(now + drain_s, self._stop_at or float("inf"))

    def _is_done(self) -> bool:
        if self._hands_over:
            return True
        if self._stop_at is None:
            return False
        is_idle = self._scheduler is None or self._scheduler.is_idle
        return is_idle or not self._lanes or self._clock() >= self._stop_at

    def _idle_wait_s(self) -> float | None:
        """Until the next thing that time alone brings about; None: only a message wakes us."""
        deadlines = [group.next_deadline for group in self._groups.values()]
        deadlines += [self._step_deadline(lane) for lane in self._lanes.values()]
        deadlines += [self._front.next_deadline, self._stop_at, self._changes.next_deadline]
        deadlines += [self._shortage.next_deadline]
        deadlines += [self._chaos.next_deadline]
        if self._scheduler is not None:
            deadlines.append(self._scheduler.next_deadline())
            if self._is_stuck():
                deadlines.append(self._clock() + STUCK_WAIT_S)
        known = [deadline for deadline in deadlines if deadline is not None]
        return max(0.0, min(known) - self._clock()) if known else None

    def _is_stuck(self) -> bool:
        """Whether there is work, but no answer will come that makes us plan again.

        The scheduler may return no plan once although the next call would, for example when
        it could only preempt.
        """
        assert self._scheduler is not None
        return not any(lane.num_unanswered for lane in self._lanes.values()) and any(
            self._scheduler.has_work(number) for number in self._lanes
        )

    def _step_deadline(self, lane: Lane) -> float | None:
        return lane.deadline(self._launch.step_timeout_s)

    def _keep_time(self, now: float) -> None:
        for group in self._groups.values():
            self._follow(group.tick(now), now)
        for number, lane in list(self._lanes.items()):
            deadline = self._step_deadline(lane)
            if deadline is not None and now >= deadline:
                why = (
                    f"step {lane.step} was not answered within step_timeout_s="
                    f"{self._launch.step_timeout_s:g}"
                )
                self._fail(number, lane.epoch, -1, why, now, reason="hung", step=lane.step)
        if self._scheduler is not None:
            self._news += self._scheduler.expire(now)
            if self._stop_at is None:
                self._follow(self._changes.keep_time(self._scheduler, now), now)
                if (failure := self._changes.renewed()) is not None:
                    self._back.tell_supervisor(GroupsRenewed(failure))
        if self._shortage.runs_out(now):
            self._end_waiting(now)
        for recovery in self._recoveries.look(self._scheduler, now):
            self._log.info("group_recovered", **recovery.fields())
        self._front.keep_time(now)
        self._chaos.keep_time(now)

    def _note_turned_away(self) -> None:
        """Say that there are peers who cannot, or may not, talk to us; ever more rarely."""
        total = self._links.num_turned_away
        if total < self._next_turned_away:
            return
        self._next_turned_away = 2 * total
        self._log.warning(
            "connections_turned_away",
            total=total,
            front=self._links.front.num_turned_away,
            back=self._links.back.num_turned_away,
        )

    def _dispatch(self, now: float) -> None:
        """Give each group that has room another plan, the same bytes to each rank."""
        if self._scheduler is None:
            return
        for number, lane in list(self._lanes.items()):
            while number in self._lanes and (plan := self._plan(self._scheduler, number, now)):
                frame = FROM_ENGINE.encode(plan)
                lane.sent(now)
                self._steps.planned(number, plan, self._scheduler)
                for rank, peer in enumerate(lane.peers):
                    try:
                        self._links.back.send(peer, frame)
                    except PeerGone as error:
                        if not error.has_left:  # else its last words come first
                            self._fail(
                                number,
                                lane.epoch,
                                rank,
                                str(error),
                                now,
                                reason="hung",
                                step=plan.step,
                            )

    def _plan(self, scheduler: Scheduler, number: int, now: float) -> StepPlan | None:
        began = self._clock()
        plan = scheduler.plan(number, now)
        if plan is not None:
            scheduler.meter.took("plan", self._clock() - began)
        return plan

    def _flush(self, now: float) -> None:
        news, self._news = self._news, []
        self._front.deliver(news, now)

    # --- the back socket ---

    def _receive(self, now: float) -> None:
        for event in self._back.receive():
            match event:
                case WorkerAnswered(peer=peer, group=number, result=result):
                    self._apply(number, peer, result, now)
                case WorkerAllocated(peer=peer, group=number):
                    self._follow(self._groups[number].ready(peer, now), now)
                case WorkerGreeted(peer=peer, greeting=greeting):
                    self._greet(peer, greeting, now)
                case RankPhase():
                    self._moved(event)
                case WorkerCame(peer=peer, hello=hello):
                    self._came(peer, hello, now)
                case WorkerLeft(peer=peer, group=number):
                    self._follow(self._groups[number].left(peer, now), now)
                case WorkerFailed():
                    self._fail(
                        event.group,
                        event.epoch,
                        event.rank,
                        event.message,
                        now,
                        reason="raised" if event.key else "died",
                        step=event.step,
                    )
                case GroupStopped(group=number, epoch=epoch):
                    if number in self._groups:
                        if epoch == self._groups[number].epoch:
                            self._recoveries.fenced(number, now)
                        self._follow(self._groups[number].stopped(epoch, now), now)
                case StartPhases(seconds=seconds):
                    self._start_s = seconds
                case Shutdown(message=message, drain_s=drain_s):
                    self.stop(message, drain_s)
                case UpgradeNews():
                    self._upgrade = event
                case RenewGroups():
                    self._changes.renew()
                case HandOver():
                    self._hands_over = True
                case SupervisorLeft():
                    self.stop("the supervisor is gone")

    def _greet(self, peer: bytes, greeting: WorkerGreeting, now: float) -> None:
        group = self._groups.get(greeting.group)
        if group is None:
            self._back.refuse(peer, "stranger", f"there is no group {greeting.group}")
            return
        self._follow(group.greet(peer, greeting, self._difference(greeting.facts), now), now)

    def _difference(self, facts: NodeFacts) -> str:
        """Why a worker's node cannot be one of ours; empty if it can."""
        if self._ask_facts is None:
            return ""
        if self._facts is None:
            self._facts = self._ask_facts(self._changes.model_dir)
        return why_not_alike(facts, self._facts)

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
        self._follow(group.hello(peer, hello, now), now)

    def _apply(self, number: int, peer: bytes, result: StepResult, now: float) -> None:
        lane = self._lanes.get(number)
        if self._scheduler is None or lane is None or peer != lane.peers[lane.answering]:
            self._back.drop(f"a result for group {number} that it did not have to give")
            return
        began = self._clock()
        try:
            outcome = self._scheduler.apply(number, result, now)
        except ProtocolError as error:
            self._fail(
                number,
                lane.epoch,
                lane.answering,
                str(error),
                now,
                reason="wrong",
                step=result.step,
            )
            return
        self._news += outcome
        self._scheduler.meter.took("apply", self._clock() - began)
        if result.epoch == lane.epoch:
            took_s = lane.answered(now)
            self._scheduler.meter.took("wire", max(0.0, took_s - result.compute_s))
            self._steps.answered(number, result, outcome, now)

    # --- groups ---

    def _fail(
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
        if number not in self._groups:
            self._back.drop(f"news of group {number}, which does not exist")
            return
        self._log.warning(
            "rank_failed", group=number, epoch=epoch, rank=rank, step=step, error=message
        )
        failed = self._groups[number].failed(
            epoch, rank, message, reason=reason, step=step, now=now
        )
        self._follow(failed, now)

    def _follow(self, instructions: Iterable[Order], now: float) -> None:
        """Do what a group's state machine asks for, or who changes the groups."""
        for instruction in instructions:
            if isinstance(instruction, UseWeights):
                self._facts = None
                self._back.tell_supervisor(UseModel(str(instruction.model_dir)))
                continue
            self._recoveries.follow(instruction, now)
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
            self._news += scheduler.add_group(ready.group, ready.epoch, ready.num_blocks, now)
        except ConfigError as error:
            self._fail(ready.group, ready.epoch, -1, str(error), now, reason="wrong")
            return
        stages = self._launch.scheduler.num_stages
        answering = group.num_ranks // stages * (stages - 1)
        self._lanes[ready.group] = Lane(ready.epoch, group.peers, answering)
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
        self._shortage.ends()
        self._front.open(scheduler, self._server_info(limits), now)

    def change(self, wish: Change, now: float) -> Changed:
        """Change what a client wants changed of the groups, or say why not."""
        before = self._changes.drained_nodes
        is_serving = self._scheduler is not None and self._stop_at is None
        answer, instructions = self._changes.ask(wish, is_serving, now)
        if self._changes.drained_nodes != before:  # before a group starts elsewhere
            self._back.tell_supervisor(AvoidNodes(self._changes.drained_nodes))
        self._follow(instructions, now)
        return answer

    def _ask_upgrade(self, asked: UpgradeCluster) -> ClusterUpgraded:
        """Pass it on to the supervisor, or say how far it is."""
        refusal = ""
        if not asked.only_asks:
            if self._upgrade.phase != "idle":
                refusal = (
                    f"an upgrade runs (phase {self._upgrade.phase}); ask again when it is over"
                )
            elif self._scheduler is None or self._stop_at is not None:
                refusal = NOT_SERVING
            else:
                self._upgrade = replace_fields(self._upgrade, phase="prepare", failure="")
                self._back.tell_supervisor(BeginUpgrade())
        news = self._upgrade
        return ClusterUpgraded(
            phase=news.phase, failure=news.failure, num_done=news.num_done, refusal=refusal
        )

    def _inject(self, asked: InjectFault, now: float) -> FaultInjected:
        return self._chaos.inject(asked, self._groups.values(), self._scheduler, now)

    def _why_no_room(self, num_more: int) -> str:
        stats = () if self._scheduler is None else self._scheduler.stats().groups
        if self._ask_free_bytes is None:
            return ""
        host, free_bytes = socket.gethostname(), self._ask_free_bytes()
        return why_no_room(num_more, self._groups.values(), stats, host, free_bytes)

    def _drain(self, number: int, drains: bool, now: float) -> None:
        assert self._scheduler is not None
        self._log.info("group_draining" if drains else "group_stays", group=number)
        self._news += self._scheduler.drain_group(number, now, drains=drains)

    def _retire(self, retired: Retire, now: float) -> None:
        """Let a group go; what still ran there waits for another one."""
        number, num_moved = retired.group, 0
        if self._lanes.pop(number, None) is not None:
            assert self._scheduler is not None
            num_moved = self._scheduler.groups[number].num_running
            self._news += self._scheduler.lose_group(number, now)
        self._log.info(
            "group_retired",
            group=number,
            epoch=retired.epoch,
            num_moved=num_moved,
            comes_back=retired.comes_back,
        )
        self._back.dismiss(number, f"group {number} is not needed any more")
        self._back.tell_supervisor(RetireGroup(number, retired.epoch, retired.comes_back))

    def _scheduler_for(self, limits: ModelLimits) -> Scheduler:
        """The scheduler; all groups must serve the same model.

        Raises:
            ConfigError: this group serves another one.
        """
        if self._scheduler is None:
            self._scheduler = Scheduler(self._launch.scheduler, limits, self._journal)
        if self._scheduler.model != limits:
            raise ConfigError(
                f"this group serves a model with {limits}, the others one with "
                f"{self._scheduler.model}. Give every node the same checkpoint"
            )
        return self._scheduler

    def _server_info(self, limits: ModelLimits) -> ServerInfo:
        return ServerInfo(
            protocol=PROTOCOL_VERSION,
            engine_id=self._launch.instance,
            model=self._launch.model,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            block_size=self._launch.scheduler.block_size,
            max_num_seqs=self._launch.scheduler.max_num_seqs,
            end_ids=self._end_ids,
            tokenizer_digest=self._tokenizer_digest,
            defaults=self._defaults,
        )

    def _lose(self, lost: Lose, now: float) -> None:
        """Take a group's sequences back; if nobody is left to compute them, end them."""
        if lost.retires:
            self._retire(Retire(lost.group, lost.epoch), now)
            return
        group = self._groups[lost.group]
        lane = self._lanes.pop(lost.group, None)
        if lane is not None and not lost.step:
            lost = replace(lost, step=lane.step)
        why = why_lost(lost)
        moved: list[Sequence] = []
        if lane is not None:
            assert self._scheduler is not None
            moved = self._scheduler.groups[lost.group].sequences
            self._news += self._take_back(group, why, now)
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
            self._recoveries.lost(lost, moved, noticed_s, now)
        self._follow(self._changes.lost(lost), now)
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
        if not self._lanes:
            self._shortage.begins(why, now)
        if not any(group.has_hope for group in self._groups.values()):
            self._end_waiting(now)

    def _take_back(self, group: WorkerGroup, why: str, now: float) -> list[Outgoing]:
        """The scheduler's part of a loss. A request that is found to be its cause has ended, and
        the group is not to blame."""
        assert self._scheduler is not None
        num_before = self._scheduler.counters.poisoned
        news = self._scheduler.lose_group(group.group, now, why)
        if self._scheduler.counters.poisoned > num_before:
            self._log.warning("request_given_up", group=group.group, reason="poison")
            group.excuse()
        return news

    def _end_waiting(self, now: float) -> None:
        """No group takes plans, and none did for too long, or none will: refuse who waits and who
        comes, until one does. Streams that have begun wait on while one may come."""
        has_hope = any(group.has_hope for group in self._groups.values())
        why = f"no worker group is left: {self._shortage.why}"
        if has_hope:
            why = (
                f"no worker group has taken requests for no_workers_s="
                f"{self._launch.no_workers_s:g}; the last one was lost: {self._shortage.why}"
            )
        self._front.lack_workers(why, RETRY_AFTER_S if has_hope else None, now)
        if self._scheduler is not None:
            self._news += self._scheduler.fail_waiting(why, now, begun=not has_hope)

    # --- status and end ---

    def status(self, now: float) -> Status:
        """How everything is, for whoever asks."""
        return build_status(
            self._launch,
            is_stopping=self._stop_at is not None,
            uptime_s=now - self._began,
            groups=self._groups.values(),
            drained_nodes=self._changes.drained_nodes,
            lanes=self._lanes,
            stats=None if self._scheduler is None else self._scheduler.stats(),
            desk=self._front,
            num_dropped=self._back.num_dropped
            + self._front.num_dropped
            + self._links.front.num_malformed
            + self._links.back.num_malformed,
            num_turned_away=self._links.num_turned_away,
            now=now,
        )

    def metrics(self, now: float) -> EngineMetrics:
        """What was counted and measured. That it cannot be said must not end the serving."""
        scheduler = self._scheduler
        meter = Meter() if scheduler is None else scheduler.meter
        if meter.num_errors > self._num_metric_errors:
            self._num_metric_errors = meter.num_errors
            self._log.warning("metric_errors", total=meter.num_errors, error=meter.last_error)
        try:
            stats = None if scheduler is None else scheduler.stats()
            return build_metrics(
                self.status(now), stats, meter, self._front.refused, self._start_s, self._recoveries
            )
        except Exception as error:
            self._log.error("metrics_failed", error=repr(error))
            return EngineMetrics(model=self._launch.model, values={}, distributions={})

    @property
    def _num_live(self) -> int:
        return 0 if self._scheduler is None else len(self._scheduler.live)

    def _end(self) -> None:
        """Tell everybody; the sockets are closed by whoever opened them."""
        now = self._clock()
        if self._hands_over:
            self._front.hand_over("another engine takes over", now)
            self._log.info("engine_handed_over", num_live=self._num_live)
            return
        if self._scheduler is not None:
            live = [sequence.serial for sequence in self._scheduler.live.values()]
            self._news += self._scheduler.end_early(live, Finish.ABORT, self._stop_message, now)
        self._flush(now)
        self._back.stop_all(self._stop_message)
        self._log.info("engine_stopped", num_aborted=len(live) if self._scheduler else 0)
