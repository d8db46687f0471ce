"""Plans for groups of several pipeline stages."""

import pytest

from scheduler.config import SchedulerConfig
from scheduler.errors import ConfigError
from scheduler.plan import StepPlan
from tests.scheduler.builders import CLIENT, Bench, make_request
from tests.scheduler.scripted import expected_output


def running(bench: Bench, count: int, max_tokens: int = 100) -> None:
    """So many streams that have their first token."""
    for handle in range(count):
        bench.submit(make_request(handle, max_tokens=max_tokens))
    while bench.step() is None or any(not output for output in bench.outputs.values()):
        pass


def slots_of(plan: StepPlan | None) -> set[int]:
    assert plan is not None
    return set(plan.slot.tolist())


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_streams_are_dealt_to_as_many_plans_as_there_are_stages(num_stages: int) -> None:
    bench = Bench(num_stages=num_stages)
    running(bench, 9)

    plans = [slots_of(bench.plan()) for _ in range(num_stages)]

    assert set.union(*plans) == set(range(9))
    assert sum(len(plan) for plan in plans) == 9, "a stream is in two plans"
    assert max(len(plan) for plan in plans) == -(-9 // num_stages)
    assert bench.plan() is None, "each stream waits for its token"


def test_each_answer_lets_the_same_streams_go_on() -> None:
    bench = Bench(num_stages=2)
    running(bench, 6)
    first, second = slots_of(bench.plan()), slots_of(bench.plan())

    for _ in range(3):
        bench.answer()
        assert slots_of(bench.plan()) == first
        bench.answer()
        assert slots_of(bench.plan()) == second


def test_streams_that_came_apart_are_even_again_after_a_round() -> None:
    bench = Bench(num_stages=2, num_blocks=200)
    running(bench, 4)
    bench.plan(), bench.plan()
    for handle in range(10, 16):  # six more, whose prompts go into the plans that follow
        bench.submit(make_request(handle, max_tokens=100))
    sizes = []
    for _ in range(12):
        bench.answer()
        plan = bench.plan()
        sizes.append(0 if plan is None else len(plan.slot))

    assert sizes[-4:] == [5, 5, 5, 5]


def test_every_plan_carries_its_tokens() -> None:
    bench = Bench(num_stages=2)
    request = make_request(1, max_tokens=6)
    bench.submit(request)

    plans = []
    while not bench.scheduler.is_idle:
        plans.append(bench.step())

    known = request.prompt.tolist() + bench.outputs[CLIENT, 1]
    carried = [token for plan in plans if plan is not None for token in plan.token.tolist()]
    assert bench.outputs[CLIENT, 1] == expected_output(request.prompt.tolist(), 11, ends=False)
    assert carried == known[:-1]


def test_a_prompt_is_cut_into_plans_that_follow_each_other_at_once() -> None:
    bench = Bench(num_stages=3, max_num_batched_tokens=16)
    bench.submit(make_request(1, prompt=50))

    plans = [bench.plan() for _ in range(4)]

    assert [plan.count.tolist() for plan in plans if plan is not None] == [[16], [16], [16], [2]]
    assert bench.plan() is None


@pytest.mark.parametrize(("plans", "most"), [(1, 3), (2, 4)])
def test_so_many_plans_may_be_in_flight(plans: int, most: int) -> None:
    bench = Bench(num_stages=3, max_plans_in_flight=plans, max_num_batched_tokens=16)
    bench.submit(make_request(1, prompt=200))

    assert sum(bench.plan() is not None for _ in range(9)) == most


def test_nothing_is_computed_for_a_sequence_that_has_ended() -> None:
    bench = Bench(num_stages=2)
    for handle in range(5):
        bench.submit(make_request(handle, max_tokens=4 + handle, ends=True))
    bench.run()

    assert bench.scheduler.counters.dropped_tokens == 0


def test_a_group_has_one_stage_at_least() -> None:
    with pytest.raises(ConfigError, match="num_stages must be at least 1, got 0"):
        SchedulerConfig(num_stages=0)
