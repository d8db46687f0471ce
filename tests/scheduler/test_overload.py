"""Five times as much as can be done, for a minute: who gets in, how soon, and when else."""

import functools

import numpy as np
import pytest

from scheduler.promises import HORIZON_S
from scheduler.replay import replay
from tests.scheduler.overload import Call, Simulation, step_s

NUM_PROMPT = 100
UNLOADED_S = step_s(NUM_PROMPT)
CAPACITY = 0.91
"""Calls per second that eight places serve when there are always enough; see the first test."""


def length(rng: np.random.Generator) -> int:
    return int(min(400, 20 + rng.exponential(80)))


@functools.cache
def minute(seed: int, *, says_length: bool = True) -> tuple[Simulation, list[Call]]:
    """A minute of five times the capacity, and a second minute in which the refused return."""
    simulation = Simulation(seed=seed, says_length=says_length, max_queue_s=0.1)
    calls = simulation.arrive_at_random(5 * CAPACITY, 0.0, 60.0, NUM_PROMPT, length)
    simulation.run(until=120.0)
    return simulation, calls


def share_in_at_second_try(calls: list[Call]) -> float:
    came_back = [call for call in calls if len(call.tries) > 1]
    assert len(came_back) > 50
    return sum(call.num_refusals == 1 for call in came_back) / len(came_back)


def served_per_s(calls: list[Call], until: float) -> float:
    return sum(call.ended_at is not None and call.ended_at <= until for call in calls) / until


def test_the_capacity_is_what_the_other_tests_take_it_for() -> None:
    simulation = Simulation()
    calls = simulation.arrive_at_random(50.0, 0.0, 4.0, NUM_PROMPT, length)
    simulation.run()

    assert len(calls) / simulation.now == pytest.approx(CAPACITY, rel=0.1)


@pytest.mark.parametrize("seed", range(2))
def test_accepted_calls_start_as_if_nothing_were_going_on(seed: int) -> None:
    simulation, calls = minute(seed)

    waits = [c.first_token_s / UNLOADED_S for c in calls if c.first_token_s is not None]
    assert np.median(waits) < 1.5
    assert np.quantile(waits, 0.9) < 1.75
    assert simulation.most_waiting <= 3


@pytest.mark.parametrize("says_length", [True, False])
def test_nine_of_ten_that_come_back_as_told_get_in(says_length: bool) -> None:
    calls = [call for seed in range(2) for call in minute(seed, says_length=says_length)[1]]

    assert share_in_at_second_try(calls) >= 0.9


@pytest.mark.parametrize("seed", range(2))
def test_keeping_places_free_costs_a_third_of_the_capacity_at_most(seed: int) -> None:
    _, calls = minute(seed)

    assert served_per_s(calls, 120.0) > CAPACITY * 2 / 3


def test_a_queue_bounded_by_its_number_keeps_its_promises_too() -> None:
    simulation = Simulation(max_waiting_requests=6)
    calls = simulation.arrive_at_random(5 * CAPACITY, 0.0, 60.0, NUM_PROMPT, length)
    simulation.run(until=120.0)

    assert share_in_at_second_try(calls) >= 0.9
    assert simulation.most_waiting == 6
    assert served_per_s(calls, 120.0) > 0.9 * CAPACITY


def test_places_are_not_kept_free_for_those_who_never_come_back() -> None:
    simulation = Simulation(returns=0.0, max_queue_s=0.1)
    calls = simulation.arrive_at_random(5 * CAPACITY, 0.0, 60.0, NUM_PROMPT, length)
    simulation.run(until=60.0)

    assert served_per_s(calls, 60.0) > CAPACITY * 2 / 3


def test_what_is_remembered_of_refused_calls_ends_with_their_time() -> None:
    simulation = Simulation(returns=0.0, max_queue_s=0.1)
    simulation.arrive_at_random(5 * CAPACITY, 0.0, 20.0, NUM_PROMPT, length)
    simulation.run()
    assert simulation.scheduler.num_promised > 10

    simulation.arrive(simulation.now + HORIZON_S + 10.0, NUM_PROMPT, 1)
    simulation.arrive(simulation.now + HORIZON_S + 20.0, NUM_PROMPT, 1)
    simulation.run()
    assert simulation.scheduler.num_promised == 0


def test_idle_time_is_not_taken_for_long_stays() -> None:
    """A clock that has run for long, and a server that nobody has called for an hour."""
    simulation = Simulation(max_num_seqs=1, max_queue_s=0.0, returns=0.0, began=1e6)
    for at in (1e6 + 1.0, 1e6 + 3600.0, 1e6 + 3601.0):
        simulation.arrive(at, 10, 50)
    simulation.run()

    assert len(simulation.told_s) == 1
    assert simulation.told_s[0] <= 10


def test_who_comes_back_too_soon_keeps_the_place_and_gets_no_second_one() -> None:
    simulation = Simulation(max_num_seqs=1, max_queue_s=0.0, returns=0.0)
    simulation.arrive(0.0, 10, 100)
    hasty = simulation.arrive(1.0, 10, 5)
    for at in (1.5, 1.6, 1.7):
        simulation.arrive_again(at, hasty)
    simulation.run(until=2.0)

    assert len(hasty.tries) == 4
    assert simulation.scheduler.num_promised == 1


def test_a_burst_is_told_to_come_back_at_different_times() -> None:
    simulation = Simulation(max_waiting_requests=8, returns=0.0)
    simulation.arrive_at_random(2.0, 0.0, 20.0, 20, length)
    for _ in range(300):
        simulation.arrive(20.0, 20, 50)
    simulation.run(until=20.0)

    told = simulation.told_s[-280:]
    assert np.bincount(told).max() <= 3
    assert max(told) < HORIZON_S


def test_refusals_and_their_consequences_can_be_replayed() -> None:
    simulation = Simulation(max_queue_s=0.1)
    simulation.arrive_at_random(5 * CAPACITY, 0.0, 20.0, NUM_PROMPT, length)
    simulation.run(until=40.0)

    assert replay(simulation.records) == []
