"""How a queue is dealt to several groups."""

import random
from collections import Counter

import pytest

from scheduler.group import Group
from scheduler.placement import Placement
from scheduler.sequences import Sequence
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


def dealt_by_trying_all(groups: list[Group], waiting: list[Sequence]) -> list[int | None]:
    """What `Placement` does, slow and obvious."""
    tokens = {group.group_id: group.backlog for group in groups}
    free = {group.group_id: group.running.num_free for group in groups}
    dealt: list[int | None] = []
    for sequence in waiting:
        costs = [
            (
                tokens[group.group_id]
                + len(sequence.tokens)
                - len(group.match(sequence)) * group.block_size,
                group.group_id,
            )
            for group in groups
            if free[group.group_id] and not group.is_draining and sequence.limit <= group.max_len
        ]
        if not costs:
            dealt.append(None)
            continue
        cost, number = min(costs)
        tokens[number], free[number] = cost, free[number] - 1
        dealt.append(number)
    return dealt


@pytest.mark.parametrize("seed", range(20))
def test_the_deal_is_that_of_trying_every_group_for_every_sequence(seed: int) -> None:
    chance = random.Random(seed)
    bench = Bench(num_groups=5, num_blocks=60, max_num_seqs=6, max_num_batched_tokens=64)
    stems = [[chance.randrange(1, 49)] * chance.randrange(16, 60) for _ in range(3)]

    def submit(handle: int) -> None:
        tail = [chance.randrange(1, 49) for _ in range(chance.randrange(1, 40))]
        most = chance.choice((3, 30, 300))
        bench.submit(make_request(handle, prompt=chance.choice(stems) + tail, max_tokens=most))

    for handle in range(20):
        submit(handle)
    for _ in range(chance.randrange(30)):
        bench.step(chance.randrange(5))
    for handle in range(20, 50):
        submit(handle)
    bench.scheduler.drain_group(chance.randrange(5), 0.0)
    groups = list(bench.scheduler.groups.values())
    waiting = list(bench.scheduler.waiting)
    expected = dealt_by_trying_all(groups, waiting)

    placement = Placement(groups)
    found = [placement.deal(sequence) for sequence in waiting]

    assert [None if group is None else group.group_id for group in found] == expected
    assert len(set(expected)) > 2
