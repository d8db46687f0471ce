"""The engine core's loop: receive, plan, dispatch, apply, reply.

One thread owns both sockets and the scheduler. It sleeps until a message or a deadline comes,
so that an idle engine uses no CPU. What it may do is decided elsewhere: by the scheduler, by the
front desk for clients, and by the group desk for worker groups.
"""

import signal
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from cluster.back_desk import BackDesk, SupervisorLeft, WorkerAnswered
from cluster.changes import NOT_SERVING
from cluster.chaos_desk import ChaosDesk
from cluster.engine_launch import EngineLaunch
from cluster.engine_metrics import build_metrics
from cluster.errors import PeerGone
from cluster.front_desk import FrontDesk, Wish
from cluster.frontend.tokenizer_files import TokenizerFiles
from cluster.group_desk import GroupDesk
from cluster.lanes import Lane
from cluster.links.engine_links import EngineLinks
from cluster.logs import EventLog
from cluster.messages.changes import ClusterUpgraded, UpgradeCluster
from cluster.messages.clients import GenerationDefaults, ServerInfo
from cluster.messages.faults import InjectFault
from cluster.messages.reports import EngineMetrics, MetricsRequest, Status, StatusRequest
from cluster.messages.sockets import ToClient
from cluster.messages.supervisor import BeginUpgrade, HandOver, Shutdown, StartPhases, UpgradeNews
from cluster.messages.workers import NodeFacts
from cluster.served_model import Checkpoints
from cluster.status import build_status
from cluster.step_feed import StepFeed
from cluster.wire import FROM_ENGINE, PROTOCOL_VERSION
from scheduler.errors import ProtocolError, RequestFailed
from scheduler.journal import Journal
from scheduler.meter import Meter
from scheduler.plan import StepPlan, StepResult
from scheduler.request import Finish
from scheduler.scheduler import Scheduler

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
        self._signals = signals
        self._clock = clock
        self._log = log
        self._began = clock()
        self._start_s: dict[str, float] = {}
        """Seconds of each phase of the start, once it is over."""
        self._steps = StepFeed(self._began)
        self._back = BackDesk(links.back, launch.engine_id, launch.key, log)
        info = ServerInfo(
            protocol=PROTOCOL_VERSION,
            engine_id=launch.instance,
            model=launch.model,
            max_model_len=0,
            vocab_size=0,
            block_size=launch.scheduler.block_size,
            max_num_seqs=launch.scheduler.max_num_seqs,
            end_ids=end_ids,
            tokenizer_digest="" if tokenizer is None else tokenizer.digest,
            defaults=defaults,
            num_crashes=launch.num_restarts,
            last_crash=launch.last_loss if launch.num_restarts else "",
            suspect_after=launch.scheduler.poison_after,
        )
        self._front = FrontDesk(links.front, tokenizer, info, log, self._steps)
        self._groups = GroupDesk(
            launch,
            self._back,
            self._front,
            journal=journal,
            now=self._began,
            log=log,
            facts=facts,
            free_bytes=free_bytes,
            checkpoints=checkpoints,
        )
        self._chaos = ChaosDesk(launch.allow_chaos, self._back.send, log)
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

    # --- the loop ---

    def run(self) -> None:
        """Serve until stopped. One thread owns both sockets and the scheduler."""
        while not self._is_done():
            self._links.wait(self._idle_wait_s())
            if signals := self._signals():
                self.stop(f"the engine received {signals[0].name}")
            self._turn(self._clock())
        self._end()

    def _turn(self, now: float) -> None:
        """All that there is to do now.

        Raises:
            RequestFailed: for the sake of one request we cannot go on. It has been told; the others
                go on with the next engine.
        """
        try:
            self._work(now)
        except RequestFailed as failed:
            error = failed.__cause__ or failed
            self._front.give_up(failed.client, failed.handle, error, now)
            raise

    def _work(self, now: float) -> None:
        self._receive(now)  # first the workers, who must not wait
        self._keep_time(now)  # by what has come: we may have been stopped for a while
        self._dispatch(now)
        self._front.deliver(now)
        for client, wish in self._front.receive(now):
            self._front.send(client, self._answer(wish, now), now)
        self._note_turned_away()
        self._dispatch(now)
        self._front.deliver(now)

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
        scheduler = self._groups.scheduler
        is_idle = scheduler is None or scheduler.is_idle
        return is_idle or not self._groups.lanes or self._clock() >= self._stop_at

    def _idle_wait_s(self) -> float | None:
        """Until the next thing that time alone brings about; None: only a message wakes us."""
        deadlines = [self._groups.next_deadline, self._front.next_deadline]
        deadlines += [self._chaos.next_deadline, self._stop_at]
        scheduler = self._groups.scheduler
        if scheduler is not None:
            deadlines.append(scheduler.next_deadline())
            if self._is_stuck(scheduler):
                deadlines.append(self._clock() + STUCK_WAIT_S)
        known = [deadline for deadline in deadlines if deadline is not None]
        return max(0.0, min(known) - self._clock()) if known else None

    def _is_stuck(self, scheduler: Scheduler) -> bool:
        """Whether there is work, but no answer will come that makes us plan again.

        The scheduler may return no plan once although the next call would, for example when
        it could only preempt.
        """
        lanes = self._groups.lanes
        return not any(lane.num_unanswered for lane in lanes.values()) and any(
            scheduler.has_work(number) for number in lanes
        )

    def _keep_time(self, now: float) -> None:
        self._groups.keep_time(self._stop_at is not None, now)
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

    # --- plans and answers ---

    def _dispatch(self, now: float) -> None:
        """Give each group that has room another plan."""
        scheduler, lanes = self._groups.scheduler, self._groups.lanes
        if scheduler is None:
            return
        for number, lane in list(lanes.items()):
            while number in lanes and (plan := self._plan(scheduler, number, now)):
                lane.sent(now)
                self._steps.planned(number, plan, scheduler)
                self._send(number, lane, plan, now)

    def _plan(self, scheduler: Scheduler, number: int, now: float) -> StepPlan | None:
        began = self._clock()
        plan = scheduler.plan(number, now)
        if scheduler.failed:
            self._end_failed(scheduler, now)
        if plan is not None:
            scheduler.meter.took("plan", self._clock() - began)
        return plan

    def _end_failed(self, scheduler: Scheduler, now: float) -> None:
        """End the requests that alone could not be looked at for a plan."""
        for sequence, error in scheduler.failed:
            self._front.note_failure(sequence.client, sequence.request.handle, error)
        self._front.queue(scheduler.end_failed(now))

    def _send(self, number: int, lane: Lane, plan: StepPlan, now: float) -> None:
        """The same bytes to each rank."""
        frame = FROM_ENGINE.encode(plan)
        for rank, peer in enumerate(lane.peers):
            try:
                self._links.back.send(peer, frame)
            except PeerGone as error:
                if not error.has_left:  # else its last words come first
                    why = str(error)
                    self._groups.fail(
                        number, lane.epoch, rank, why, now, reason="hung", step=plan.step
                    )

    def _apply(self, number: int, peer: bytes, result: StepResult, now: float) -> None:
        scheduler, lane = self._groups.scheduler, self._groups.lanes.get(number)
        if scheduler is None or lane is None or peer != lane.peers[lane.answering]:
            self._back.drop(f"a result for group {number} that it did not have to give")
            return
        began = self._clock()
        try:
            outcome = scheduler.apply(number, result, now)
        except ProtocolError as error:
            rank, why = lane.answering, str(error)
            self._groups.fail(number, lane.epoch, rank, why, now, reason="wrong", step=result.step)
            return
        self._front.queue(outcome)
        scheduler.meter.took("apply", self._clock() - began)
        if result.epoch == lane.epoch:
            took_s = lane.answered(now)
            scheduler.meter.took("wire", max(0.0, took_s - result.compute_s))
            self._steps.answered(number, result, outcome, now)

    # --- what comes ---

    def _receive(self, now: float) -> None:
        """From workers and the supervisor."""
        for event in self._back.receive():
            match event:
                case WorkerAnswered(peer=peer, group=number, result=result):
                    self._apply(number, peer, result, now)
                case StartPhases(seconds=seconds):
                    self._start_s = seconds
                case Shutdown(message=message, drain_s=drain_s):
                    self.stop(message, drain_s)
                case UpgradeNews():
                    self._upgrade = event
                case HandOver():
                    self._hands_over = True
                case SupervisorLeft():
                    self.stop("the supervisor is gone")
                case _:
                    self._groups.take(event, now)

    def _answer(self, wish: Wish, now: float) -> ToClient:
        """From clients."""
        match wish:
            case StatusRequest():
                return self._status(now)
            case MetricsRequest():
                return self._metrics(now)
            case UpgradeCluster():
                return self._ask_upgrade(wish)
            case InjectFault():
                groups, scheduler = self._groups.groups.values(), self._groups.scheduler
                return self._chaos.inject(wish, groups, scheduler, now)
            case _:
                return self._groups.change(wish, self._is_serving, now)

    @property
    def _is_serving(self) -> bool:
        return self._groups.scheduler is not None and self._stop_at is None

    def _ask_upgrade(self, asked: UpgradeCluster) -> ClusterUpgraded:
        """Pass it on to the supervisor, or say how far it is."""
        refusal = ""
        if not asked.only_asks:
            if self._upgrade.phase != "idle":
                refusal = (
                    f"an upgrade runs (phase {self._upgrade.phase}); ask again when it is over"
                )
            elif not self._is_serving:
                refusal = NOT_SERVING
            else:
                self._upgrade = replace(self._upgrade, phase="prepare", failure="")
                self._back.tell_supervisor(BeginUpgrade())
        news = self._upgrade
        return ClusterUpgraded(
            phase=news.phase, failure=news.failure, num_done=news.num_done, refusal=refusal
        )

    # --- status and end ---

    def _status(self, now: float) -> Status:
        """How everything is, for whoever asks."""
        scheduler = self._groups.scheduler
        return build_status(
            self._launch,
            is_stopping=self._stop_at is not None,
            uptime_s=now - self._began,
            groups=self._groups.groups.values(),
            drained_nodes=self._groups.drained_nodes,
            lanes=self._groups.lanes,
            stats=None if scheduler is None else scheduler.stats(),
            desk=self._front,
            num_dropped=self._back.num_dropped
            + self._front.num_dropped
            + self._links.front.num_malformed
            + self._links.back.num_malformed,
            num_turned_away=self._links.num_turned_away,
            now=now,
        )

    def _metrics(self, now: float) -> EngineMetrics:
        """What was counted and measured. That it cannot be said must not end the serving."""
        scheduler = self._groups.scheduler
        meter = Meter() if scheduler is None else scheduler.meter
        if meter.num_errors > self._num_metric_errors:
            self._num_metric_errors = meter.num_errors
            self._log.warning("metric_errors", total=meter.num_errors, error=meter.last_error)
        try:
            return build_metrics(
                self._status(now),
                None if scheduler is None else scheduler.stats(),
                meter,
                self._front.refused,
                self._start_s,
                self._groups.recoveries,
            )
        except Exception as error:
            self._log.error("metrics_failed", error=repr(error))
            return EngineMetrics(model=self._launch.model, values={}, distributions={})

    def _end(self) -> None:
        """Tell everybody; the sockets are closed by whoever opened them."""
        now = self._clock()
        scheduler = self._groups.scheduler
        live = [] if scheduler is None else [one.serial for one in scheduler.live.values()]
        if self._hands_over:
            self._front.hand_over("another engine takes over", now)
            self._log.info("engine_handed_over", num_live=len(live))
            return
        if scheduler is not None:
            self._front.queue(scheduler.end_early(live, Finish.ABORT, self._stop_message, now))
        self._front.deliver(now)
        self._back.stop_all(self._stop_message)
        self._log.info("engine_stopped", num_aborted=len(live))
