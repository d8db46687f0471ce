"""A rank whose engine is gone: it forgets all sequences, and serves the next engine as if new."""

from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler.sampling import SamplingParams
from tests.worker import pipe_tasks
from tests.worker.groups import WorkerGroup
from tests.worker.plans import PlanDriver
from tests.worker.rank_processes import Raised, RankProcesses
from tests.worker.test_pipeline import meet  # noqa: F401  # a fixture
from tests.worker.test_runner import (
    assert_greedy,
    generate,
    make_driver,
    random_prompt,
    run_step,
)
from tests.worker.tiny_models import save_model
from worker.parallel import MeetingPoint

SCORED = SamplingParams(temperature=0.0, max_tokens=None, seed=0, prompt_logprobs=1)
EDITED = SamplingParams(temperature=0.0, max_tokens=None, seed=0, repetition_penalty=1.3)


def another_driver(group: WorkerGroup) -> PlanDriver:
    """Of an engine that finds the group loaded."""
    config = group.runners[0]._config
    assert config.num_kv_blocks is not None
    return PlanDriver(
        block_size=config.block_size,
        num_blocks=config.num_kv_blocks,
        num_slots=config.max_num_seqs,
        gives_all=config.pipeline_parallel_size > 1,
    )


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
def test_after_a_reset_in_the_middle_of_everything_plans_begin_anew(
    tmp_path: Path, tp: int, pp: int
) -> None:
    model, folder = save_model("llama", tmp_path)
    with WorkerGroup(folder, tp=tp, pp=pp) as group:
        driver = make_driver(group)
        sequences = [driver.admit(random_prompt(n, seed=n), SCORED) for n in (5, 30)]
        sequences += [driver.admit(random_prompt(9, seed=1), EDITED)]
        run_step(group, driver, [(one, 4) for one in sequences])
        store = [runner._store for runner in group.runners]
        group.reset()

        assert [runner._store for runner in group.runners] == store
        driver = another_driver(group)
        sequences = [driver.admit(random_prompt(n, seed=2 * n)) for n in (9, 21, 40)]
        generate(group, driver, sequences, tokens=8, budget=24)

    for sequence in sequences:
        assert_greedy(model, sequence)


def test_ranks_may_be_reset_before_there_is_a_pool(tmp_path: Path) -> None:
    _, folder = save_model("llama", tmp_path)
    with WorkerGroup(folder, tp=2) as group:
        group.load()
        group.measure()
        group.reset()


@pytest.mark.slow
def test_a_stage_that_had_a_plan_which_the_next_one_had_not_is_found(
    ranks: RankProcesses,
    meet: Callable[[str], MeetingPoint],  # noqa: F811
) -> None:
    """In shared memory both say so; over TCP, gloo ends the process."""
    meeting = meet("shared")
    for rank in range(2):
        ranks.start(rank, pipe_tasks.meet_after_a_step_of_one, "shared", meeting)
    answers = [ranks.answer(rank) for rank in range(2)]
    assert all(isinstance(answer, Raised) for answer in answers), answers
