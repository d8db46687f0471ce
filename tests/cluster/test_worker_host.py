"""One rank's host, seen from the engine's side of its socket."""

import platform
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.backend import WorkerLaunch
from cluster.links.engine_links import EngineLinks
from cluster.links.sockets import LinkLimits
from cluster.logs import EventLog
from cluster.loss_reasons import EXIT_DONE, EXIT_FAILED, EXIT_NO_ENGINE, EXIT_PEER_LOST
from cluster.messages.clients import Refusal
from cluster.messages.sockets import FromEngine, ToEngine
from cluster.messages.workers import (
    MayLoad,
    PoolSize,
    RankPhase,
    Stop,
    WorkerFailed,
    WorkerGreeting,
    WorkerHello,
    WorkerReady,
)
from cluster.wire import FROM_ENGINE, PROTOCOL_VERSION, TO_ENGINE
from cluster.worker_host import WorkerHost
from scheduler.arrays import int32
from scheduler.plan import StepPlan, StepResult
from tests.cluster.launches import make_launch
from tests.cluster.scripted import Script, ScriptedRunner, token_at

LIMITS = LinkLimits()


class Engine:
    """The other end: what the worker says, and what it is told."""

    def __init__(self, folder: Path) -> None:
        self.links = EngineLinks(
            f"ipc://{folder}/front", f"ipc://{folder}/back", front_limits=LIMITS, back_limits=LIMITS
        )
        self.script = Script()
        self.exit_code: int | None = None
        self._peer = b""
        self._heard: list[ToEngine | None] = []
        self.phases: list[RankPhase] = []
        self.greeting: ToEngine | None = None
        self._thread: threading.Thread | None = None

    def start(self, rank: int = 0, num_ranks: int = 1) -> None:
        """Let a worker come as far as loading its weights."""
        self.begin(rank, num_ranks)
        self.greeting = self.hear()
        assert isinstance(self.greeting, WorkerGreeting)
        self.tell(MayLoad())

    def begin(self, rank: int = 0, num_ranks: int = 1) -> None:
        launch = make_launch(address=self.links.back.address, rank=rank, num_ranks=num_ranks)
        self._thread = threading.Thread(target=self._run, args=(launch,))
        self._thread.start()

    def _run(self, launch: WorkerLaunch) -> None:
        host = WorkerHost(
            launch, lambda given: ScriptedRunner(given, self.script), EventLog("test-worker")
        )
        self.exit_code = host.run()

    def hear(self) -> ToEngine | None:
        """The next message but for phases of the start; None when the worker has left."""
        while not self._heard:
            self.links.wait(5.0)
            for peer, frame in self.links.back.receive():
                self._peer = peer
                message = None if frame is None else TO_ENGINE.decode(frame)
                if isinstance(message, RankPhase):
                    self.phases.append(message)
                else:
                    self._heard.append(message)
        return self._heard.pop(0)

    def tell(self, message: FromEngine) -> None:
        self.tell_frame(FROM_ENGINE.encode(message))

    def tell_frame(self, frame: bytes) -> None:
        self.links.back.send(self._peer, frame)

    def bring_up(self, rank: int = 0, num_ranks: int = 1) -> None:
        self.start(rank, num_ranks)
        assert isinstance(self.hear(), WorkerHello)
        self.tell(PoolSize(8))
        assert isinstance(self.hear(), WorkerReady)

    def ended(self) -> int | None:
        """Wait for the worker's end; its exit code."""
        assert self._thread is not None
        self._thread.join(20.0)
        return self.exit_code

    def close(self) -> None:
        self.links.close(linger_s=0.0)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    engine.close()
    if engine._thread is not None:
        assert engine.ended() is not None


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def make_plan(step: int, slots: int = 2) -> StepPlan:
    return StepPlan(epoch=1, step=step, slot=int32(range(slots)), start=int32([step] * slots))


def test_it_greets_before_it_loads_and_says_what_must_be_alike_on_all_nodes(
    engine: Engine,
) -> None:
    engine.begin(rank=1, num_ranks=2)
    greeting = engine.hear()

    assert isinstance(greeting, WorkerGreeting)
    assert (greeting.protocol, greeting.key, greeting.rank) == (PROTOCOL_VERSION, "key", 1)
    assert greeting.facts.python == platform.python_version()
    assert greeting.facts.torch
    assert greeting.facts.stoker
    assert greeting.facts.node
    assert "config.json" in greeting.facts.model_problem
    engine.tell(Stop("enough"))
    assert engine.ended() == EXIT_DONE
    assert not engine.script.has_loaded


def test_it_tells_how_far_its_start_is(engine: Engine) -> None:
    engine.bring_up()
    told = [phase.phase for phase in engine.phases]
    assert told == ["meet", "wait", "load", "profile", "allocate"]


def test_the_hello_says_who_it_is_and_what_it_can_hold(engine: Engine) -> None:
    engine.script.num_blocks = 21
    engine.start(rank=0, num_ranks=1)
    hello = engine.hear()

    assert isinstance(hello, WorkerHello)
    assert (hello.protocol, hello.engine_id, hello.key) == (PROTOCOL_VERSION, "engine", "key")
    assert (hello.group, hello.epoch, hello.rank) == (0, 1, 0)
    assert hello.capacity.num_blocks == 21


def test_rank_0_answers_each_plan_once_and_in_order(engine: Engine) -> None:
    engine.bring_up()
    for step in (1, 2, 3):
        engine.tell(make_plan(step))
    results = [engine.hear() for _ in range(3)]

    assert all(isinstance(result, StepResult) for result in results)
    assert [(r.step, r.token.tolist()) for r in results if isinstance(r, StepResult)] == [
        (step, [token_at(step + 1)] * 2) for step in (1, 2, 3)
    ]


def test_the_next_plan_begins_while_a_device_computes(engine: Engine) -> None:
    script = engine.script
    script.done = {step: threading.Event() for step in (1, 2)}
    engine.bring_up()
    engine.tell(make_plan(1))
    engine.tell(make_plan(2))
    wait_until(lambda: len(script.plans) == 2)  # while step 1 is not done
    script.done[1].set()
    first = engine.hear()
    script.done[2].set()
    second = engine.hear()

    assert isinstance(first, StepResult)
    assert isinstance(second, StepResult)
    assert (first.step, second.step) == (1, 2)


def test_a_plan_that_needs_the_last_tokens_waits_for_them(engine: Engine) -> None:
    script = engine.script
    script.done = {1: threading.Event()}
    script.alone = (2,)
    engine.bring_up()
    engine.tell(make_plan(1))
    wait_until(lambda: len(script.plans) == 1)
    engine.tell(make_plan(2))
    script.done[1].set()
    answers = [engine.hear(), engine.hear()]

    assert [a.step for a in answers if isinstance(a, StepResult)] == [1, 2]


def test_other_ranks_compute_and_say_nothing(engine: Engine) -> None:
    engine.bring_up(rank=1, num_ranks=2)
    engine.tell(make_plan(1))
    engine.tell(Stop("enough"))

    assert engine.hear() is None
    assert engine.ended() == EXIT_DONE
    assert [plan.step for plan in engine.script.plans] == [1]


def test_stop_ends_it_in_order(engine: Engine) -> None:
    engine.bring_up()
    engine.tell(Stop("enough"))
    assert engine.ended() == EXIT_DONE
    assert engine.script.released.is_set()  # the runner was closed


def test_a_refusal_ends_it_in_order(engine: Engine) -> None:
    engine.start()
    engine.hear()
    engine.tell(Refusal(reason="stranger", message="not you"))
    assert engine.ended() == EXIT_DONE


def test_an_exception_in_a_step_is_told_with_rank_and_step(engine: Engine) -> None:
    engine.script.raise_at_step = 2
    engine.bring_up(rank=1, num_ranks=2)
    engine.tell(make_plan(1))
    engine.tell(make_plan(2))
    failed = engine.hear()

    assert isinstance(failed, WorkerFailed)
    assert (failed.group, failed.epoch, failed.rank, failed.step) == (0, 1, 1, 2)
    assert (failed.reason, failed.message) == ("raised", "RuntimeError: a kernel went wrong")
    assert engine.ended() == EXIT_FAILED


def test_a_rank_that_lost_another_one_says_that_others_know_why(engine: Engine) -> None:
    engine.script.lose_peer_at_step = 1
    engine.bring_up(rank=0, num_ranks=2)
    engine.tell(make_plan(1))
    failed = engine.hear()

    assert isinstance(failed, WorkerFailed)
    assert (failed.reason, failed.step) == ("cut", 1)
    assert failed.message.endswith("rank 1 left")
    assert engine.ended() == EXIT_PEER_LOST


def test_an_exception_while_loading_is_told_before_any_hello(engine: Engine) -> None:
    engine.script.fail_at_load = "no such tensor"
    engine.start()
    failed = engine.hear()

    assert isinstance(failed, WorkerFailed)
    assert (failed.step, failed.key, failed.message) == (0, "key", "ValueError: no such tensor")
    assert engine.ended() == EXIT_FAILED


def test_a_failure_that_explains_itself_is_told_without_a_trace(
    engine: Engine, capfd: pytest.CaptureFixture[str]
) -> None:
    engine.script.unusable_model = "max_model_len=9 is too long. Lower it"
    engine.start()
    failed = engine.hear()

    assert isinstance(failed, WorkerFailed)
    assert failed.message == "max_model_len=9 is too long. Lower it"
    assert engine.ended() == EXIT_FAILED
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("frame", [b"\xc1", FROM_ENGINE.encode(PoolSize(3)), b"\x80"])
def test_what_is_not_a_plan_ends_it_with_a_word(engine: Engine, frame: bytes) -> None:
    engine.bring_up()
    engine.tell_frame(frame)
    failed = engine.hear()

    assert isinstance(failed, WorkerFailed)
    assert failed.message.startswith("WireError: ")
    assert engine.ended() == EXIT_FAILED


def test_it_ends_itself_when_the_engine_is_gone(engine: Engine) -> None:
    engine.bring_up()
    engine.close()
    assert engine.ended() == EXIT_NO_ENGINE
    assert engine.script.released.is_set()


def test_it_ends_itself_when_no_engine_comes(tmp_path: Path) -> None:
    launch = WorkerLaunch(
        **{  # type: ignore[arg-type]
            name: getattr(make_launch(address=f"ipc://{tmp_path}/nobody"), name)
            for name in WorkerLaunch.__struct_fields__
            if name != "connect_timeout_s"
        },
        connect_timeout_s=0.05,
    )
    script = Script()
    host = WorkerHost(launch, lambda given: ScriptedRunner(given, script), EventLog("test-worker"))
    assert host.run() == EXIT_NO_ENGINE
    assert script.released.is_set()
