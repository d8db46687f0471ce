"""Hosts one rank: plans in, results out, until the engine says stop or is gone.

The same host runs in a plain process and in a Ray actor. It knows nothing of how the rank
computes (`Runner`) and nothing of who started it. A rank outlives its engine: it waits for the
next one at the same address, keeps its weights and its KV pool, and forgets its sequences.
"""

import os
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from cluster.backend import WorkerLaunch
from cluster.doctor.alike import node_facts
from cluster.errors import LinkLost, ModelError, WireError
from cluster.faults import Faults
from cluster.lease import Lease
from cluster.links.dealer import DealerLink
from cluster.links.sockets import LinkLimits
from cluster.logs import EventLog
from cluster.loss_reasons import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_NO_ENGINE,
    EXIT_PEER_LOST,
    LossReason,
)
from cluster.messages.clients import Refusal
from cluster.messages.faults import Fault
from cluster.messages.sockets import FromEngine, ToEngine
from cluster.messages.workers import (
    MayLoad,
    PoolSize,
    RankCapacity,
    RankPhase,
    Stop,
    WorkerFailed,
    WorkerGreeting,
    WorkerHello,
    WorkerReady,
)
from cluster.wire import FROM_ENGINE, PROTOCOL_VERSION, TO_ENGINE
from scheduler.plan import StepPlan, StepResult
from worker.errors import ModelError as UnusableModel
from worker.errors import PoolTooLarge, PoolTooSmall
from worker.parallel_errors import PeerLost
from worker.shards import ImpossibleShards
from worker.stages import ImpossibleStages

EXPLAINED = (
    ModelError,
    UnusableModel,
    PoolTooLarge,
    PoolTooSmall,
    ImpossibleShards,
    ImpossibleStages,
)
"""Failures whose text says what to change; the trace of any other goes to the log."""

LAST_WORDS_S = 2.0
"""How long the message that explains a failure may take to leave."""

TELL_EVERY_S = 1.0
"""How often the engine is told how much was read."""

Expected = TypeVar("Expected")

LOOK_S = 0.0001
"""While a device computes, how often its host looks for the next plan and for the end."""


class Step(Protocol):
    """What `worker.launched_step.LaunchedStep` does, as the host sees it."""

    def is_done(self) -> bool: ...

    def finish(self) -> StepResult | None: ...


class Runner(Protocol):
    """What `worker.runner.ModelRunner` does, as the host sees it."""

    def load(self, report: Callable[[int, int], None]) -> bool:
        """`report` is told now and then how many bytes were read, and of how many.

        Returns whether they had been read before, and were mapped.
        """
        ...

    def measure(self) -> Struct:
        """Something with the fields of `RankCapacity`."""
        ...

    def allocate(self, num_blocks: int) -> None: ...

    def reset(self) -> None:
        """Forget all sequences; weights and pool stay. All ranks of the group do so at once."""
        ...

    def can_begin(self, plan: StepPlan) -> bool: ...

    def begin(self, plan: StepPlan) -> Step: ...

    def close(self) -> None: ...


RunnerFactory = Callable[[WorkerLaunch], Runner]


class EngineSaidStop(Exception):
    """The engine ends this worker in order, or refuses it."""


class WorkerHost:
    """One rank from its hello to its end."""

    def __init__(
        self,
        launch: WorkerLaunch,
        build: RunnerFactory,
        log: EventLog,
        *,
        began: float | None = None,
        find_model: Callable[[str], Path] = Path,
        node: str = "",
        lease: Lease | None = None,
    ) -> None:
        """Nothing is loaded yet.

        Args:
            began: when this process did, or was told to be this rank; monotonic. None: now.
            find_model: where the model of the launch lies on this node.
            node: what a user knows this node by, if not by its host name.
            lease: hears the engine's last word while this rank computes; it has the process to
                itself then. None: nobody does.
        """
        self._lease = lease
        self._find_model = find_model
        self._node = node or socket.gethostname()
        self._told_at = 0.0
        self._began = time.monotonic() if began is None else began
        self._launch = launch
        self._build = build
        self._log = log
        self._step = 0
        self._start_s: dict[str, float] = {}
        self._capacity: RankCapacity | None = None
        """Measured once the weights are here"""
        self._num_blocks = 0
        """Of the pool; 0: there is none yet"""
        self._is_met = False
        """The engine at the other end of the link has answered."""
        self._faults = Faults(log)
        self._runner: Runner | None = None
        self._link = self._dial()

    def _dial(self) -> DealerLink:
        launch = self._launch
        return DealerLink(
            launch.address,
            LinkLimits(
                max_message_bytes=FROM_ENGINE.max_bytes, peer_timeout_s=launch.engine_timeout_s
            ),
            launch.link_keys,
        )

    def run(self) -> int:
        """Load, serve, and close; the exit code of the process."""
        code = EXIT_DONE
        try:
            self._serve_engines()
        except EngineSaidStop as stop:
            self._log.info("worker_stopping", reason=stop)
        except LinkLost as error:
            self._log.error("engine_lost", step=self._step, error=error)
            code = EXIT_NO_ENGINE
        except PeerLost as error:  # who is to blame, others say
            self._report(error, "cut")
            code = EXIT_PEER_LOST
        except Exception as error:
            self._report(error, "raised")
            code = EXIT_FAILED
        finally:
            has_reported = code in (EXIT_FAILED, EXIT_PEER_LOST)
            self._link.close(linger_s=LAST_WORDS_S if has_reported else 0.0)
            if self._runner is not None:
                self._runner.close()
        return code

    def _serve_engines(self) -> None:
        """Serve one engine, and whichever comes after it, in place of it.

        Raises:
            LinkLost: none came, at first or within `takeover_s` of the loss of the last one.
        """
        wait_s = self._launch.connect_timeout_s
        while True:
            try:
                self._begin(wait_s)
                self._serve()
            except LinkLost as error:
                wait_s = self._launch.takeover_s
                if not (wait_s and self._is_met):
                    raise
                self._log.warning("engine_lost", step=self._step, waits_s=wait_s, error=error)
            self._link.close()
            self._link, self._is_met = self._dial(), False
            self._forget_sequences()
            self._step = 0

    def _forget_sequences(self) -> None:
        """Now, since the other ranks have lost the engine too: a rank that waits for another one
        in a step of which that one was never told is found at once."""
        if self._runner is not None and self._capacity is not None:
            self._runner.reset()

    def _begin(self, wait_s: float) -> None:
        """Come as far as taking plans; what is here already is not made again."""
        model_dir = self._find_model(self._launch.runner.model_dir)
        self._greet(model_dir)
        if self._runner is None:
            spec = replace(self._launch.runner, model_dir=str(model_dir))
            self._runner = self._build(replace(self._launch, runner=spec))
        self._tell_phase("wait")
        self._link.wait_connected(wait_s)
        self._is_met = True
        self._expect(MayLoad)
        is_loaded = self._capacity is not None
        capacity = self._capacity = self._capacity or self._load(self._runner)
        self._send(self._hello(capacity, is_loaded=is_loaded))
        self._make_pool(self._runner, self._expect(PoolSize).num_blocks)
        self._send(WorkerReady())
        self._log.info("worker_ready", num_blocks=self._num_blocks, was_loaded=is_loaded)

    def _load(self, runner: Runner) -> RankCapacity:
        self._start_s = {}
        self._phase_ended("import")
        self._tell_phase("load")
        was_mapped = runner.load(self._has_read)
        self._phase_ended("map" if was_mapped else "load")
        self._tell_phase("profile")
        capacity = msgspec.convert(runner.measure(), RankCapacity, from_attributes=True)
        self._phase_ended("profile")
        self._log.info(
            "worker_loaded",
            weights="mapped" if was_mapped else "read",
            weight_bytes=capacity.weight_bytes,
            shared_bytes=capacity.shared_bytes,
            activation_bytes=capacity.activation_bytes,
            free_bytes=capacity.free_bytes,
            block_bytes=capacity.block_bytes,
            kv_cache_dtype=capacity.kv_cache_dtype,
            num_blocks=capacity.num_blocks,
            device=capacity.device,
        )
        return capacity

    def _make_pool(self, runner: Runner, num_blocks: int) -> None:
        self._tell_phase("allocate")
        if num_blocks != self._num_blocks:
            runner.allocate(num_blocks)
            self._num_blocks = num_blocks

    def _greet(self, model_dir: Path) -> None:
        """Be known to the engine before anything takes time, and be compared with the others."""
        launch = self._launch
        self._send(
            WorkerGreeting(
                protocol=PROTOCOL_VERSION,
                engine_id=launch.engine_id,
                key=launch.key,
                group=launch.group,
                epoch=launch.epoch,
                rank=launch.rank,
                facts=node_facts(self._node, model_dir),
            )
        )
        self._tell_phase("meet")

    def _tell_phase(self, phase: str, done: int = 0, total: int = 0) -> None:
        launch = self._launch
        self._told_at = time.monotonic()
        self._send(
            RankPhase(
                group=launch.group,
                epoch=launch.epoch,
                rank=launch.rank,
                node=self._node,
                phase=phase,
                done=done,
                total=total,
            )
        )

    def _has_read(self, done: int, total: int) -> None:
        if time.monotonic() - self._told_at >= TELL_EVERY_S:
            self._tell_phase("load", done, total)

    def _expect(self, kind: type[Expected]) -> Expected:
        """The engine's next message, which must be of one kind."""
        message = self._next()
        if not isinstance(message, kind):
            raise WireError(f"expected a {kind.__name__}, got {type(message).__name__}")
        return message

    def _phase_ended(self, name: str) -> None:
        """Add a phase of the start: what has passed since the one before."""
        self._start_s[name] = time.monotonic() - self._began - sum(self._start_s.values())

    def _hello(self, capacity: RankCapacity, *, is_loaded: bool) -> WorkerHello:
        launch = self._launch
        return WorkerHello(
            protocol=PROTOCOL_VERSION,
            engine_id=launch.engine_id,
            key=launch.key,
            group=launch.group,
            epoch=launch.epoch,
            rank=launch.rank,
            capacity=capacity,
            host=socket.gethostname(),
            pid=os.getpid(),
            start_s={} if is_loaded else self._start_s,
            is_loaded=is_loaded,
        )

    def _serve(self) -> None:
        """Compute plan after plan. A device that computes by itself is given the next plan before
        it has done with the last one, so that it never waits for its host."""
        assert self._runner is not None
        running: Step | None = None
        while True:
            plan = self._next_plan(running)
            if running is not None and (plan is None or not self._runner.can_begin(plan)):
                self._answer(running)
                running = None
            if plan is None:
                continue
            self._step = plan.step
            self._faults.begin(plan.step)
            following = self._runner.begin(plan)
            if running is not None:
                self._answer(running)
            running = following

    def _next_plan(self, running: Step | None) -> StepPlan | None:
        """The next plan, however long it takes; None if `running` is done before it comes."""
        while True:
            if running is None:
                plan = self._next()
            else:
                frame = None
                while frame is None:
                    if running.is_done():
                        return None
                    frame = self._link.take()
                    if frame is None:
                        time.sleep(LOOK_S)
                plan = self._decode(frame)
            if isinstance(plan, Fault):
                self._suffer(plan)
            elif not isinstance(plan, StepPlan):
                raise WireError(f"expected a plan, got {type(plan).__name__}")
            elif not self._faults.misses_plan():
                return plan

    def _suffer(self, fault: Fault) -> None:
        """Let a fault come, where a test cluster allows them.

        Raises:
            LinkLost: it is the end of the connection.
        """
        if not self._launch.allow_chaos:
            raise WireError(f"a fault ({fault.kind}) without allow_chaos")
        if fault.kind == "cut":
            self._log.warning("fault", kind=fault.kind)
            self._link.close()
            raise LinkLost("an injected fault has cut the connection")
        self._faults.take(fault)

    def _answer(self, step: Step) -> None:
        result = step.finish()
        if result is not None and not self._faults.loses_answer():
            self._send(result)

    def _next(self) -> FromEngine:
        """The engine's next message, however long it takes.

        Raises:
            EngineSaidStop: it is the last one.
            LinkLost: the engine is gone.
        """
        if self._lease is not None:
            self._lease.set_listening(True)
        frame = self._link.receive(timeout_s=None)
        if self._lease is not None:
            self._lease.set_listening(False)
        assert frame is not None
        return self._decode(frame)

    def _decode(self, frame: bytes) -> FromEngine:
        message = FROM_ENGINE.decode(frame)
        if isinstance(message, Stop | Refusal):
            raise EngineSaidStop(message.message)
        return message

    def _send(self, message: ToEngine) -> None:
        self._link.send(TO_ENGINE.encode(message))

    def _report(self, error: Exception, reason: LossReason) -> None:
        """Tell the engine what broke, where it can be told."""
        launch = self._launch
        is_explained = isinstance(error, EXPLAINED)
        text = str(error) if is_explained else f"{type(error).__name__}: {error}"
        tell = self._log.info if is_explained else self._log.error  # the engine says it, too
        tell("worker_failed", step=self._step, error=text)
        if not is_explained:
            traceback.print_exception(error)
        try:
            self._link.wait_connected(LAST_WORDS_S)
            self._send(
                WorkerFailed(
                    group=launch.group,
                    epoch=launch.epoch,
                    rank=launch.rank,
                    step=self._step,
                    message=text,
                    key=launch.key,
                    reason=reason,
                )
            )
        except LinkLost as lost:
            self._log.error("engine_lost", step=self._step, error=lost, untold=text)
