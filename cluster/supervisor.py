"""Starts a cluster, keeps it, and ends it so that nothing is left, whenever it is asked to.

Order of the start: the engine core and the backend at the same time, then the workers of all
groups at once; ready when every group is. Order of the end: the engine (which tells clients
and workers), then the workers, then the sockets' folder. Each part has a limit in time, after
which it is killed. One thread waits for everything at once: signals, the parent, the engine,
the backend.

An engine that ends unasked is followed by another one at the same addresses; the workers stay.
"""

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.announcements import ClusterReady, EngineListens
from cluster.api_servers import ApiServers
from cluster.backend import Backend, Place, RankExit, Report, WorkerLaunch
from cluster.backend_thread import (
    BackendFailed,
    BackendOpened,
    BackendThread,
    GroupEnded,
    GroupStarted,
    Happening,
)
from cluster.doctor.checks import table
from cluster.doctor.scene import Finding
from cluster.engine_keeper import (
    ENGINE_COMMAND,
    EngineEnded,
    EngineKeeper,
    EngineListening,
    EngineNews,
    EngineSaid,
    StandbyFailed,
    StandbyReady,
)
from cluster.engine_recovery import EngineRecovery
from cluster.errors import ClusterLost, StartFailed, StartInterrupted
from cluster.group_ledger import GroupLedger
from cluster.keys import remove_key_file, write_key_file
from cluster.launch_plan import LaunchPlan
from cluster.logs import EventLog
from cluster.loss_reasons import LossReason
from cluster.messages.sockets import FromEngine
from cluster.messages.supervisor import (
    AvoidNodes,
    BeginUpgrade,
    GroupLost,
    GroupReady,
    GroupsRenewed,
    GroupStopped,
    HandOver,
    RenewGroups,
    RetireGroup,
    Shutdown,
    StartGroup,
    StartPhases,
    UpgradeNews,
    UseModel,
)
from cluster.messages.workers import RankPhase, WorkerFailed
from cluster.private_folder import PrivateFolder
from cluster.restarts import RestartLimits
from cluster.start_phases import StartClock
from cluster.start_watch import StartWatch
from cluster.upgrade import Step, Upgrade
from cluster.wakeup import SignalPipe, WakePipe
from cluster.wire import PROTOCOL_VERSION

FENCE_WAIT_S = 1.0
"""For ranks of a lost group to end before they are killed: nothing of theirs is wanted, and others
wait for their place."""

BACKEND_PATIENCE_S = 15.0
"""For what the backend is doing to come to its end before it can be closed: Ray's own start
takes up to ten seconds and cannot be broken off."""


@dataclass(frozen=True, slots=True)
class Examined:
    """What was found on this host before anything was started on it."""

    findings: tuple[Finding, ...]


class Supervisor:
    """One start of one cluster, in the main thread of its own process."""

    def __init__(
        self,
        plan: LaunchPlan,
        make_backend: Callable[[Report], Backend],
        signals: SignalPipe,
        *,
        parent_fd: int | None,
        on_ready: Callable[[ClusterReady], None],
        log: EventLog,
        api: ApiServers | None = None,
        engine_command: Sequence[str] = ENGINE_COMMAND,
        examine: Callable[[], Sequence[Finding]] | None = None,
        began: float | None = None,
    ) -> None:
        """Nothing is started yet.

        Args:
            began: when the start was asked for, monotonic; None: now.
            parent_fd: a descriptor whose end of file says that the parent is gone.
            on_ready: told once, when requests are taken.
            api: what serves HTTP, if anything does.
            examine: looks at this host, in a thread beside the start; a failure ends the start.
        """
        self._plan = plan
        self._config = plan.config
        self._make_backend = make_backend
        self._signals = signals
        self._parent_fd = parent_fd
        self._on_ready = on_ready
        self._log = log
        self._api = api
        self._engine = EngineKeeper(
            engine_command,
            None if plan.back_keys is None else plan.back_keys.client,
            limits=RestartLimits(
                max_restarts=plan.config.max_engine_restarts,
                longest_pause_s=plan.config.longest_restart_pause_s,
            ),
            start_timeout_s=plan.config.start_timeout_s,
            hang_s=plan.config.engine_hang_s,
            peer_timeout_s=plan.config.peer_timeout_s,
            log=log,
        )
        self._num_engines = 1
        """Processes that there were, one after the other"""
        self._num_engine_restarts = 0
        self._drained_nodes: tuple[str, ...] = ()
        self._upgrade = Upgrade(PROTOCOL_VERSION)
        self._upgrade_began: float | None = None
        self._num_upgrades = 0
        self._recovery: EngineRecovery | None = None
        """Until requests are taken again"""
        self._began = time.monotonic() if began is None else began
        self._start_clock = StartClock(self._began)
        self._watch = StartWatch(
            plan.config.pipeline_parallel_size * plan.config.tensor_parallel_size
        )
        self._examine = examine
        self._findings: tuple[Finding, ...] = ()
        self._inbox: queue.SimpleQueue[Happening | Examined] = queue.SimpleQueue()
        self._wake = WakePipe()
        self._host = ""
        """Of this machine, as the backend says when it is open; empty: workers are here too."""
        self._metrics_dir = self._key_file = ""
        self._listens: EngineListens | None = None
        """What the first engine said; the others listen there too."""
        self._groups = GroupLedger()
        self._start_phases: StartPhases | None = None
        """Once everything is up"""
        self._stop_reason = ""
        self._is_up = False
        self._is_ending = False
        self.is_stuck = False
        """Something could not be ended in time; only the end of this process ends it."""

    def run(self) -> None:
        """Bring the cluster up, keep it until somebody asks to stop, end it.

        Raises:
            StartFailed: it did not come up.
            StartInterrupted: it was asked to stop before it was up.
            ClusterLost: it was up, and its last group was lost, or the engine ended too often.
        """
        with ExitStack() as parts:
            self._start(parts)
            while not self._is_up:
                self._turn(self._began + self._config.start_timeout_s)
            while not self._stop_reason:
                self._turn(None)
            self._log.info("cluster_stopping", reason=self._stop_reason)
        self._log.info("cluster_stopped")

    # --- start ---

    def _start(self, parts: ExitStack) -> None:
        folder = PrivateFolder(self._config.socket_dir)
        parts.callback(folder.remove)
        self._metrics_dir = str(folder.path / "metrics")
        (folder.path / "metrics").mkdir()
        front = self._config.front_address or folder.address("front")
        self._write_key_file(front, folder.path / "key", parts)
        self._hands = BackendThread(self._make_backend(self._tell), self._tell)
        parts.callback(self._end_backend)
        if self._api is not None:
            parts.callback(self._api.end, self._config.stop_timeout_s)
        self._watch.expect(self._config.backend, "is being brought up", time.monotonic())
        self._hands.open(self._config.start_timeout_s)
        if self._examine is not None:
            threading.Thread(target=self._examine_host, name="examine", daemon=True).start()
        self._start_clock.parts_launched(time.monotonic())
        back = self._config.back_address or self._back_address(folder)
        parts.callback(self._end_engine)
        self._engine.start(self._plan.engine(front, back))
        self._watch.expect("the engine", "has not said that it listens", time.monotonic())
        if back.startswith("ipc://"):
            self._start_all_groups(back)  # they may dial before the engine listens

    def _examine_host(self) -> None:
        assert self._examine is not None
        self._tell(Examined(tuple(self._examine())))

    def _back_address(self, folder: PrivateFolder) -> str:
        """Where workers dial: a socket file, or this host as the Ray that others share knows it."""
        if not self._config.ray_address:
            return folder.address("back")
        while not self._host:
            self._turn(self._began + self._config.start_timeout_s)
        return _tcp_address(self._host, 0)  # any free one

    def _write_key_file(self, front_address: str, default: Path, parts: ExitStack) -> None:
        keys = self._plan.front_keys
        if keys is None or not front_address.startswith("tcp://"):
            return
        path = Path(self._config.key_file or default).absolute()
        write_key_file(path, keys.client)
        parts.callback(remove_key_file, path, keys.client)
        self._key_file = str(path)

    def _start_all_groups(self, back_address: str) -> None:
        for group in range(self._config.num_groups):
            self._start_group(back_address, group, 1)

    def _start_group(self, back_address: str, group: int, epoch: int) -> None:
        def launches(group: int, epoch: int, places: Sequence[Place]) -> list[WorkerLaunch]:
            return self._plan.workers(back_address, group, epoch, places)

        self._groups.begins(group, epoch)
        self._watch.begins(group, epoch, time.monotonic())
        config = self._config
        stages, ranks = config.pipeline_parallel_size, config.tensor_parallel_size
        self._hands.start(group, epoch, stages, ranks, launches, config.start_timeout_s)

    def _engine_listens(self, listens: EngineListens) -> None:
        self._watch.came("the engine")
        for news in self._groups.news():
            self._engine.send(news)
        if self._start_phases is not None:
            self._engine.send(self._start_phases)
        self._engine.send(self._upgrade_news())
        if self._recovery is not None:
            self._recovery.listens(time.monotonic())
        if self._listens is not None:
            return
        self._listens = listens
        self._note("engine_listens", front=listens.front_address, back=listens.back_address)
        if self._api is not None:
            self._api.start(listens.front_address, self._key_file, metrics_dir=self._metrics_dir)
        if not listens.back_address.startswith("ipc://"):
            self._start_all_groups(listens.back_address)

    def _note(self, phase: str, **fields: object) -> None:
        """A phase of the start is over; seconds are since the launch."""
        self._log.info(phase, after_s=time.monotonic() - self._began, **fields)

    # --- waiting for everything ---

    def _turn(self, deadline: float | None) -> None:
        """Wait for the next thing that happens, and see to it."""
        known = [deadline, self._watch.next_deadline, self._engine.next_deadline]
        known += [] if self._api is None else [self._api.next_deadline]
        next_s = min((when for when in known if when is not None), default=None)
        ready = self._wait(None if next_s is None else max(0.0, next_s - time.monotonic()))
        if self._signals.fd in ready:
            for number in self._signals.read():
                if self._is_upgrade(number):
                    self._upgrade_asked(number.name)
                else:
                    self._asked(number.name)
        if self._parent_fd in ready and not os.read(self._parent_fd or 0, 4096):
            self._parent_fd = None
            self._asked("whoever started it has closed it or ended")
        for news in self._engine.look(ready):
            self._follow_engine(news)
        self._wake.clear()
        while not self._inbox.empty():
            self._take(self._inbox.get())
        if self._api is not None and not self._is_ending:
            self._api.look(ready)
            self._may_be_up()
            if (failure := self._api.replaced()) is not None:
                self._upgrade.replaced(failure)
                self._do([])
        for wait in self._watch.due(time.monotonic()):
            seconds, node = wait.seconds, wait.node
            self._log.info("waiting", who=wait.who, node=node, doing=wait.doing, seconds=seconds)
        if deadline is not None and time.monotonic() >= deadline and not self._is_ending:
            raise StartFailed(
                f"not ready within start_timeout_s={self._config.start_timeout_s:g}: "
                f"{self._what_is_missing()}"
            )

    def _what_is_missing(self) -> str:
        """What is still waited for, and what was found on this host."""
        waits = [wait.text() for wait in self._watch.waits(time.monotonic())]
        if not waits:
            return "the groups are ready, but not every API server takes connections"
        lines = ["; ".join(waits)]
        if self._findings:
            lines += ["What `stoker doctor` finds on this host:", table(self._findings)]
        return "\n".join(lines)

    def _wait(self, timeout_s: float | None) -> set[int]:
        fds = [self._signals.fd, self._wake.fd]
        if self._parent_fd is not None:
            fds.append(self._parent_fd)
        if self._api is not None and not self._is_ending:
            fds += self._api.fds
        return self._engine.wait(timeout_s, fds)

    def _is_upgrade(self, number: signal.Signals) -> bool:
        """Whether a signal asks for an upgrade, not for the end."""
        return number is signal.SIGUSR2 or (
            number is signal.SIGTERM and self._config.handover and self._is_up
        )

    def _asked(self, reason: str) -> None:
        """Somebody asks to stop; once more shortens the end."""
        if self._is_ending:
            self._engine.send(Shutdown(drain_s=0.0, message=f"asked again: {reason}"))
            return
        self._stop_reason = reason
        if not self._is_up:
            raise StartInterrupted(f"asked to stop before it was up: {reason}")

    def _failure(self, message: str) -> StartFailed | ClusterLost:
        return ClusterLost(message) if self._is_up else StartFailed(message)

    # --- the backend ---

    def _tell(self, happening: Happening | Examined) -> None:
        """From any thread."""
        self._inbox.put(happening)
        self._wake.wake()

    def _take(self, happening: Happening | Examined) -> None:
        match happening:
            case Examined(findings=findings):
                self._examined(findings)
            case BackendOpened(seconds=seconds, host=host):
                self._host = host
                self._watch.came(self._config.backend)
                self._start_clock.backend_opened(time.monotonic())
                self._note("backend_open", seconds=seconds)
            case GroupStarted(group=group, epoch=epoch, seconds=seconds):
                self._start_clock.group_placed(group, time.monotonic())
                self._watch.placed(group, epoch, time.monotonic())
                self._note("group_started", group=group, epoch=epoch, seconds=seconds)
            case GroupEnded(group=group, epoch=epoch):
                self._group_is_over(group, epoch)
            case BackendFailed():
                self._backend_failed(happening)
            case RankExit():
                self._rank_exited(happening)

    def _examined(self, findings: tuple[Finding, ...]) -> None:
        self._findings = findings
        failed = [finding for finding in findings if finding.level == "fail"]
        if failed and not self._is_up and not self._is_ending:
            raise StartFailed(f"this host is not fit for this start:\n{table(failed)}")
        for finding in findings:
            if finding.level != "ok":
                self._log.warning(
                    "finding",
                    check=finding.check,
                    level=finding.level,
                    subject=finding.subject,
                    seen=finding.seen,
                    fix=finding.fix,
                )

    def _backend_failed(self, failed: BackendFailed) -> None:
        self._log.error(
            "backend_failed", group=failed.group, epoch=failed.epoch, error=failed.message
        )
        if self._is_ending:
            return
        if failed.group is None or not self._is_up:
            raise self._failure(failed.message)
        self._failed(failed.group, failed.epoch, -1, failed.message)
        self._group_is_over(failed.group, failed.epoch)

    def _rank_exited(self, gone: RankExit) -> None:
        level = self._log.info if gone.was_asked or self._is_ending else self._log.warning
        level("rank_exited", group=gone.group, epoch=gone.epoch, rank=gone.rank, how=gone.message)
        if not gone.was_asked:
            self._failed(gone.group, gone.epoch, gone.rank, gone.message, gone.reason)

    def _failed(
        self, group: int, epoch: int, rank: int, message: str, reason: LossReason = "died"
    ) -> None:
        failure = WorkerFailed(group=group, epoch=epoch, rank=rank, message=message, reason=reason)
        self._groups.failed(failure)
        self._engine.send(failure)

    def _group_is_over(self, group: int, epoch: int) -> None:
        self._groups.over(group, epoch)
        self._engine.send(GroupStopped(group, epoch))

    # --- the engine ---

    def _follow_engine(self, news: EngineNews) -> None:
        match news:
            case EngineListening(listens=listens):
                self._engine_listens(listens)
            case EngineSaid(message=message):
                self._follow(message)
            case EngineEnded(how=how) if not self._is_ending:
                self._engine_ended(how)
            case StandbyReady(protocol=protocol, version=version):
                self._do(self._upgrade.stands(protocol, version))
            case StandbyFailed(why=why):
                self._upgrade.fail(why)
                self._do([])

    def _engine_ended(self, how: str) -> None:
        """Begin another one, which takes the workers over.

        Raises:
            StartFailed: the cluster was not up yet.
            ClusterLost: it has ended too often.
        """
        if self._listens is None or not self._is_up:
            raise StartFailed(f"the engine process ended: {how}")
        was_asked = self._upgrade.hands_over
        self._upgrade.engine_ended()
        pause_s = 0.0 if was_asked else self._engine.pause_s()
        if pause_s is None:
            limit = self._config.max_engine_restarts
            raise ClusterLost(f"the engine process ended: {how}; max_engine_restarts={limit}")
        if was_asked:
            self._log.info("engine_handed_over", how=how)
        else:
            self._num_engine_restarts += 1
            restarts = self._num_engine_restarts
            self._log.error("engine_lost", how=how, restarts=restarts, pause_s=pause_s)
        now = time.monotonic()
        if not was_asked:
            self._recovery = EngineRecovery(how, self._num_engine_restarts, now, now + pause_s)
        self._watch.expect("the engine", "has not said that it listens", now)
        self._num_engines += 1
        launch = self._plan.engine(
            self._listens.front_address,
            self._listens.back_address,
            epochs=self._groups.epochs(),
            num_wanted=self._groups.num_wanted,
            number=self._num_engines,
            num_restarts=self._num_engine_restarts,
            last_loss=how,
            drained_nodes=self._drained_nodes,
        )
        self._engine.start(launch, pause_s)

    def _follow(self, message: FromEngine) -> None:
        match message:
            case GroupReady():
                self._group_ready(message)
            case GroupLost():
                self._group_lost(message)
            case RankPhase():
                self._watch.moved(message, time.monotonic())
            case BeginUpgrade():
                self._upgrade_asked("a client asks")
            case GroupsRenewed(failure=failure):
                self._do(self._upgrade.renewed(failure))
            case AvoidNodes(nodes=nodes):
                self._drained_nodes = nodes
                self._hands.avoid(nodes)
            case UseModel(model_dir=model_dir):
                self._plan = replace(self._plan, model_dir=Path(model_dir))
            case RetireGroup(group=group, epoch=epoch, comes_back=comes_back):
                self._groups.retired(group, epoch, comes_back=comes_back)
                self._hands.stop(group, epoch, self._config.stop_timeout_s)
            case StartGroup(group=group, epoch=epoch):
                assert self._listens is not None
                self._start_group(self._listens.back_address, group, epoch)
            case _:
                self._log.warning("engine_message_dropped", kind=type(message).__name__)

    def _group_ready(self, ready: GroupReady) -> None:
        self._note("group_ready", group=ready.group, epoch=ready.epoch, num_blocks=ready.num_blocks)
        self._start_clock.group_ready(ready.group, ready.start_s, time.monotonic())
        self._watch.ended(ready.group)
        self._groups.ready(ready.group, ready.epoch)
        if self._recovery is not None:
            self._log.warning("engine_recovered", **self._recovery.serves(time.monotonic()))
            self._recovery = None
        self._may_be_up()
        self._do(self._upgrade.serves())

    # --- upgrades ---

    def _upgrade_asked(self, reason: str) -> None:
        """Replace what runs by what is installed now."""
        if not self._is_up or self._is_ending or self._upgrade.is_running:
            self._log.warning("upgrade_refused", reason=reason, phase=self._upgrade.phase)
            return
        self._log.info("upgrade_begins", reason=reason)
        self._upgrade_began = time.monotonic()
        self._do(self._upgrade.begin())

    def _do(self, steps: Iterable[Step]) -> None:
        """What an upgrade asks for; then say how far it is."""
        for step in steps:
            self._log.info("upgrade_step", step=step)
            match step:
                case "prepare":
                    self._engine.prepare()
                    self._hands.forget_code()
                case "hand_over":
                    self._engine.send(HandOver())
                case "renew":
                    self._engine.send(RenewGroups())
                case "replace_servers" if self._api is not None:
                    self._api.replace()
                case "replace_servers":
                    self._upgrade.replaced()
        if not self._upgrade.is_running and self._upgrade_began is not None:
            seconds, failure = time.monotonic() - self._upgrade_began, self._upgrade.failure
            self._upgrade_began = None
            self._num_upgrades += 1
            self._engine.give_standby_up()
            self._log.info("upgrade_ended", seconds=seconds, failure=failure)
        self._engine.send(self._upgrade_news())

    def _upgrade_news(self) -> UpgradeNews:
        upgrade = self._upgrade
        return UpgradeNews(
            phase=upgrade.phase, failure=upgrade.failure, num_done=self._num_upgrades
        )

    def _may_be_up(self) -> None:
        """Tell once that requests are taken, when they are on every way."""
        if self._is_up or self._groups.num_ready < self._config.num_groups:
            return
        if self._api is not None and not self._api.are_up:
            return
        assert self._listens is not None
        self._is_up = True
        seconds = self._start_clock.phases(time.monotonic())
        self._log.info("start_phases", **seconds)
        self._start_phases = StartPhases(seconds)
        self._engine.send(self._start_phases)
        self._note("cluster_ready", model=self._plan.model, front=self._listens.front_address)
        self._on_ready(
            ClusterReady(
                front_address=self._listens.front_address,
                engine_id=self._plan.engine_id,
                model=self._plan.model,
                key_file=self._key_file,
                http_address="" if self._api is None else self._api.url,
            )
        )

    def _group_lost(self, lost: GroupLost) -> None:
        if self._is_ending:
            return
        who = f"group {lost.group}" if lost.rank < 0 else f"rank {lost.rank} of group {lost.group}"
        when = f" at step {lost.step}" if lost.step else ""
        message = f"{who} failed{when}: {lost.message}"
        self._watch.ended(lost.group)
        self._groups.lost(lost.group, lost.epoch, restarts=lost.restarts)
        fence_s = min(self._config.stop_timeout_s, FENCE_WAIT_S)
        self._hands.stop(lost.group, lost.epoch, fence_s)
        if not self._is_up:
            raise StartFailed(message)
        if not self._groups.num_wanted:
            raise ClusterLost(message)

    # --- end ---

    def _end_engine(self) -> None:
        """Let it tell clients and workers, and end; then make it end."""
        self._is_ending = True
        began = time.monotonic()
        drain_s = self._config.drain_s if self._is_up and self._stop_reason else 0.0
        deadline = began + drain_s + self._config.stop_timeout_s
        if self._engine.is_linked:
            message = self._stop_reason or "the cluster ends"
            self._engine.send(Shutdown(drain_s=drain_s, message=message))
            while not self._engine.has_ended and time.monotonic() < deadline:
                self._turn(deadline)
        was_killed = self._engine.end()
        self._log.info("engine_ended", seconds=time.monotonic() - began, was_killed=was_killed)

    def _end_backend(self) -> None:
        self._is_ending = True
        began = time.monotonic()
        self.is_stuck = not self._hands.close(self._config.stop_timeout_s, BACKEND_PATIENCE_S)
        self._log.info("workers_ended", seconds=time.monotonic() - began, is_stuck=self.is_stuck)


def _tcp_address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
