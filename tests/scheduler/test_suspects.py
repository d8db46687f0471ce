"""A request that makes groups fail is found out, and nobody else is held to account for it."""

import pytest
from msgspec.structs import replace

from scheduler.replay import replay
from scheduler.request import Finish
from tests.scheduler.builders import CLIENT, Bench, make_request
from tests.scheduler.scripted import expected_output

PROMPT_LEN, OUTPUT_LEN = 9, 12


def make_bench(num_requests: int, **settings: object) -> Bench:
    bench = Bench(**settings)  # type: ignore[arg-type]  # a test's own words
    for handle in range(num_requests):
        bench.submit(make_request(handle, prompt=PROMPT_LEN, max_tokens=OUTPUT_LEN))
    return bench


def handles_in_flight(bench: Bench) -> set[int]:
    group = bench.scheduler.groups[0]
    serials = {serial for issued in group.unanswered for serial in issued.serial.tolist()}
    return {s.request.handle for s in bench.scheduler.live.values() if s.serial in serials}


def run_with(bench: Bench, poison: set[int]) -> int:
    """Run to the end; the group fails whenever one of `poison` is computed. How often it did."""
    num_failures = 0
    while not bench.scheduler.is_idle:
        bench.now += 1.0
        while bench.plan() is not None:
            pass
        if handles_in_flight(bench) & poison:
            num_failures += 1
            bench.lose_group(0, f"failure {num_failures}")
            bench.add_group(0, bench.num_blocks, epoch=num_failures + 1)
        else:
            bench.answer()
    assert not replay(bench.records)
    return num_failures


def assert_whole(bench: Bench, *handles: int) -> None:
    for handle in handles:
        prompt = make_request(handle, prompt=PROMPT_LEN).prompt.tolist()
        wanted = expected_output(prompt, PROMPT_LEN + OUTPUT_LEN, ends=False)
        assert bench.outputs[CLIENT, handle] == wanted
        assert bench.finishes[CLIENT, handle] is Finish.LENGTH


def test_a_request_that_kills_a_group_twice_ends_with_what_is_known() -> None:
    bench = make_bench(1)

    assert run_with(bench, {0}) == 2
    assert bench.finishes[CLIENT, 0] is Finish.ERROR
    assert bench.scheduler.counters.poisoned == 1
    message = bench.messages[CLIENT, 0]
    assert "failed 2 times" in message
    assert "1. failure 1" in message
    assert "2. failure 2" in message


@pytest.mark.parametrize("poison", [{0}, {3}, {2, 5}])
def test_the_neighbours_of_a_request_that_kills_go_on(poison: set[int]) -> None:
    bench = make_bench(6)
    run_with(bench, poison)

    assert {handle for (_, handle), end in bench.finishes.items() if end is Finish.ERROR} == poison
    assert_whole(bench, *set(range(6)) - poison)


def test_a_request_that_kills_among_others_costs_one_more_failure_at_most() -> None:
    bench = make_bench(6)
    assert run_with(bench, {3}) <= 3


def test_failures_with_progress_in_between_are_held_against_nobody() -> None:
    bench = make_bench(3)
    for epoch in range(2, 8):
        while bench.plan() is not None:
            pass
        bench.answer()
        bench.answer()
        while bench.plan() is not None:
            pass
        bench.lose_group(0, "chance")
        bench.add_group(0, bench.num_blocks, epoch)
    bench.run()

    assert_whole(bench, 0, 1, 2)


def test_a_part_of_a_long_prompt_that_kills_is_found_though_the_parts_before_it_are_computed() -> (
    None
):
    bench = make_bench(0, max_num_batched_tokens=16, max_plans_in_flight=1)
    bench.submit(make_request(0, prompt=50, max_tokens=OUTPUT_LEN))
    num_failures = 0
    while not bench.scheduler.is_idle and num_failures < 5:
        plan = bench.plan()
        assert plan is not None
        if plan.start[0] == 16:
            num_failures += 1
            bench.lose_group(0, "the second part")
            bench.add_group(0, bench.num_blocks, epoch=num_failures + 1)
        else:
            bench.answer()

    assert num_failures == 2
    assert bench.finishes[CLIENT, 0] is Finish.ERROR


def test_whose_slice_was_answered_is_no_suspect() -> None:
    bench = make_bench(1, max_plans_in_flight=1)
    for epoch in range(2, 5):
        bench.plan()
        bench.answer()
        bench.lose_group(0, "nobody was being computed")
        bench.add_group(0, bench.num_blocks, epoch)
    bench.run()

    assert_whole(bench, 0)


def test_a_group_that_leaves_in_order_accuses_nobody() -> None:
    bench = make_bench(1)
    for epoch in range(2, 8):
        bench.plan()
        bench.lose_group(0)
        bench.add_group(0, bench.num_blocks, epoch)
    bench.run()

    assert_whole(bench, 0)


def test_a_suspect_that_ends_otherwise_leaves_nothing_behind() -> None:
    bench = make_bench(2)
    bench.plan()
    bench.lose_group(0, "failure 1")
    bench.scheduler.abort(CLIENT, [0, 1], bench.now)

    assert len(bench.scheduler._suspects) == 0


def test_a_suspect_of_another_engine_is_one_here() -> None:
    bench = Bench()
    request = make_request(0, prompt=PROMPT_LEN, max_tokens=OUTPUT_LEN)
    request = replace(request, deaths=("failure of another",))
    bench.submit(request)

    assert run_with(bench, {0}) == 1
    assert bench.finishes[CLIENT, 0] is Finish.ERROR


def test_what_is_held_against_a_request_goes_with_it_to_the_next_engine() -> None:
    request = make_request(0, prompt=PROMPT_LEN, max_tokens=OUTPUT_LEN)
    bench = Bench()
    bench.submit(request)
    bench.step()
    bench.plan()
    bench.lose_group(0, "failure of another engine")
    assert bench.deaths == {(CLIENT, 0): ("failure of another engine",)}

    following = Bench()
    following.outputs = bench.outputs
    following.carry_on(replace(request, deaths=bench.deaths[CLIENT, 0]))

    assert run_with(following, {0}) == 1
    message = following.messages[CLIENT, 0]
    assert "1. failure of another engine\n2. failure 1" in message


def test_a_request_that_has_got_further_is_told_to_be_no_suspect_any_more() -> None:
    bench = make_bench(1, max_plans_in_flight=1)
    bench.plan()
    bench.lose_group(0, "failure 1")
    bench.add_group(0, bench.num_blocks, epoch=2)
    bench.step()

    assert bench.deaths == {(CLIENT, 0): ()}


def test_nobody_is_given_up_where_that_is_switched_off() -> None:
    bench = make_bench(2, poison_after=0)
    for epoch in range(2, 8):
        bench.plan()
        bench.lose_group(0, "chance")
        bench.add_group(0, bench.num_blocks, epoch)
    bench.run()

    assert_whole(bench, 0, 1)
