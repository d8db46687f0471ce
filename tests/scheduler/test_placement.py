"""How a queue is dealt to several groups."""

from collections import Counter

import pytest

from tests.scheduler.builders import CLIENT, Bench, make_request


def running(bench: Bench) -> list[int]:
    return [group.num_running for group in bench.scheduler.groups.values()]


@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_a_burst_starts_in_all_groups_with_their_next_plans(num_groups: int) -> None:
    bench = Bench(num_groups=num_groups, num_blocks=400, max_num_batched_tokens=512)
    for handle in range(8):
        bench.submit(make_request(handle, prompt=[handle + 1] * 20, max_tokens=5))

    for group in range(num_groups):
        bench.scheduler.plan(group, 0.0)

    assert sum(running(bench)) == 8
    assert max(running(bench)) <= min(running(bench)) + 1 + 8 // num_groups


def test_each_group_gets_what_it_would_have_going_soonest_by_tokens_and_not_by_number() -> None:
    bench = Bench(num_groups=2, num_blocks=400, max_num_batched_tokens=512)
    bench.submit(make_request(1, prompt=[1] * 40, max_tokens=5))
    for handle in range(2, 6):
        bench.submit(make_request(handle, prompt=[handle] * 10, max_tokens=5))
    for group in (0, 1):
        bench.scheduler.plan(group, 0.0)

    groups = {handle: bench.scheduler.live[CLIENT, handle].group_id for handle in range(1, 6)}
    assert Counter(groups.values()) == {0: 1, 1: 4}


def test_a_group_without_free_slots_is_dealt_nothing() -> None:
    bench = Bench(num_groups=2, num_blocks=400, max_num_seqs=2, max_num_batched_tokens=512)
    for handle in range(6):
        bench.submit(make_request(handle, prompt=[handle + 1] * 20, max_tokens=50))
    for group in (0, 1):
        bench.scheduler.plan(group, 0.0)
    assert running(bench) == [2, 2]
    assert bench.scheduler.num_waiting == 2

    bench.scheduler.lose_group(1, 0.0)
    bench.scheduler.plan(0, 0.0)

    assert running(bench) == [2]
    assert bench.scheduler.num_waiting == 4
