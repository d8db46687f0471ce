"""One rank's host whose engine is gone: it serves the next one at the same address."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from cluster.logs import EventLog
from cluster.loss_reasons import EXIT_DONE, EXIT_FAILED, EXIT_NO_ENGINE
from cluster.messages.workers import (
    MayLoad,
    PoolSize,
    Stop,
    WorkerGreeting,
    WorkerHello,
    WorkerReady,
)
from cluster.worker_host import WorkerHost
from scheduler.plan import StepResult
from tests.cluster.launches import make_launch
from tests.cluster.scripted import Script, ScriptedRunner
from tests.cluster.test_worker_host import Engine, make_plan, wait_until


class Rank:
    """A host in a thread, which outlives engines."""

    def __init__(self, address: str, takeover_s: float) -> None:
        self.script = Script()
        self.exit_code: int | None = None
        launch = replace(make_launch(address=address), takeover_s=takeover_s)
        self._host = WorkerHost(
            launch, lambda given: ScriptedRunner(given, self.script), EventLog("test-worker")
        )
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.exit_code = self._host.run()

    def ended(self) -> int | None:
        self._thread.join(20.0)
        return self.exit_code


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    engine.close()


def start(engine: Engine, takeover_s: float = 20.0) -> Rank:
    rank = Rank(engine.links.back.address, takeover_s)
    assert isinstance(engine.hear(), WorkerGreeting)
    return rank


def load(engine: Engine) -> WorkerHello:
    engine.tell(MayLoad())
    hello = engine.hear()
    assert isinstance(hello, WorkerHello)
    return hello


def allocate(engine: Engine) -> None:
    engine.tell(PoolSize(8))
    assert isinstance(engine.hear(), WorkerReady)


def end(engine: Engine, rank: Rank) -> None:
    engine.tell(Stop("enough"))
    assert rank.ended() == EXIT_DONE
    engine.close()


def test_it_keeps_its_weights_and_begins_with_step_1_again(first: Engine, tmp_path: Path) -> None:
    rank = start(first)
    assert not load(first).is_loaded
    allocate(first)
    for step in (1, 2):
        first.tell(make_plan(step))
        assert isinstance(first.hear(), StepResult)
    rank.script.has_loaded = False
    first.close()

    second = Engine(tmp_path)
    assert isinstance(second.hear(), WorkerGreeting)
    hello = load(second)
    assert hello.is_loaded
    assert hello.capacity.num_blocks == rank.script.num_blocks
    allocate(second)
    assert (rank.script.num_resets, rank.script.has_loaded) == (1, False)
    assert rank.script.allocated == [8]
    second.tell(make_plan(1))
    result = second.hear()
    assert isinstance(result, StepResult)
    assert result.step == 1
    end(second, rank)


def test_what_a_device_still_computes_when_the_engine_goes_is_nobodys(
    first: Engine, tmp_path: Path
) -> None:
    rank = start(first)
    rank.script.done = {1: threading.Event()}
    load(first)
    allocate(first)
    first.tell(make_plan(1))
    wait_until(lambda: len(rank.script.plans) == 1)
    first.close()

    second = Engine(tmp_path)
    assert isinstance(second.hear(), WorkerGreeting)
    load(second)
    allocate(second)
    rank.script.done.clear()
    second.tell(make_plan(1))
    assert isinstance(second.hear(), StepResult)
    end(second, rank)


@pytest.mark.parametrize("moment", ["greeted", "loaded"])
def test_an_engine_that_goes_while_it_starts_is_followed_by_the_next(
    first: Engine, tmp_path: Path, moment: str
) -> None:
    rank = start(first)
    if moment == "loaded":
        load(first)
    first.close()

    second = Engine(tmp_path)
    assert isinstance(second.hear(), WorkerGreeting)
    assert load(second).is_loaded == (moment == "loaded")
    allocate(second)
    end(second, rank)


def test_it_ends_when_no_other_engine_comes_in_time(first: Engine) -> None:
    rank = start(first, takeover_s=0.2)
    load(first)
    allocate(first)
    first.close()
    assert rank.ended() == EXIT_NO_ENGINE


def test_a_rank_that_is_out_of_step_with_the_others_ends(first: Engine) -> None:
    rank = start(first)
    rank.script.fail_at_reset = "rank 1 is out of step"
    load(first)
    allocate(first)
    first.close()
    assert rank.ended() == EXIT_FAILED
