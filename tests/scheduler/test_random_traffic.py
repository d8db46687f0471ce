"""Random traffic, aborts, time-outs and group losses against every invariant, and replay."""

import random

import msgspec
import pytest

from scheduler.replay import replay
from scheduler.request import Finish, Request
from tests.scheduler.builders import Bench, make_request
from tests.scheduler.scripted import expected_output


def drive(seed: int, num_stages: int = 1) -> Bench:
    """A few hundred random events on a random small cluster, then run to the end."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 8])
    seqs = rng.choice([2, 5, 12])
    bench = Bench(
        num_blocks=rng.choice([12, 20, 60]),
        num_groups=rng.choice([1, 1, 2, 3]),
        max_model_len=rng.choice([40, 90]),
        block_size=block_size,
        max_num_seqs=seqs,
        max_num_batched_tokens=rng.choice([seqs, seqs + 1, 17, 64]),
        max_plans_in_flight=rng.choice([1, 2]),
        num_stages=num_stages,
        policy=rng.choice(["fcfs", "priority"]),
        enable_prefix_caching=rng.random() < 0.7,
        long_prefill_token_threshold=rng.choice([0, 0, 5]),
        watermark=rng.choice([0.0, 0.1]),
        exclusive_phases=rng.random() < 0.2,
        max_head_bypasses=rng.choice([0, 2, 32]),
    )
    scheduler = bench.scheduler
    stem = [rng.randrange(1, 50) for _ in range(40)]
    prompts: dict[int, list[int]] = {}
    limits: dict[int, int] = {}
    min_tokens: dict[int, int] = {}
    requests: dict[int, Request] = {}
    arrivals: dict[int, float] = {}
    aborted: set[int] = set()
    next_epoch = 2
    lost: list[int] = []
    for handle in range(rng.randrange(10, 60)):
        for _ in range(rng.randrange(0, 4)):
            bench.now += rng.random()
            bench.take(scheduler.expire(bench.now))
            group = rng.choice([*bench.workers, None])
            if group is None:
                continue
            if rng.random() < 0.6:
                bench.plan(group)
            elif bench.in_flight[group]:
                bench.answer(group)
        length = rng.randrange(1, 38)
        shared = rng.randrange(0, length + 1) if rng.random() < 0.6 else 0
        prompt = stem[:shared] + [rng.randrange(1, 50) for _ in range(length - shared)]
        max_tokens = rng.choice([1, 3, 20, None])
        min_tokens[handle] = rng.choice([0, 0, 1])
        request = make_request(
            handle,
            prompt,
            max_tokens,
            ends=True,
            priority=rng.randrange(3) if scheduler.config.policy == "priority" else 0,
            timeout_s=rng.choice([None, None, None, 0.5, 30.0]),
            cache_salt=rng.choice([None, None, "a"]),
            min_tokens=min_tokens[handle],
        )
        max_len = scheduler.max_len
        if bench.submit(request, client=handle % 3) is None:
            prompts[handle], requests[handle], arrivals[handle] = prompt, request, bench.now
            limits[handle] = min(len(prompt) + (max_tokens or max_len), max_len)
        if prompts and rng.random() < 0.15:
            victim = rng.choice(list(prompts))
            scheduler.abort(victim % 3, [victim, 999], bench.now)
            aborted.add(victim)
        if prompts and rng.random() < 0.3:
            moved = rng.choice(list(prompts))
            if (moved % 3, moved) in scheduler.live:
                _begin_anew(bench, requests[moved], bench.now - arrivals[moved])
        if len(bench.workers) > 1 and rng.random() < 0.05:
            group = rng.choice(list(bench.workers))
            bench.lose_group(group)
            lost.append(group)
        elif lost and rng.random() < 0.3:
            bench.add_group(
                lost.pop(), scheduler.groups[next(iter(bench.workers))].cache.num_blocks, next_epoch
            )
            next_epoch += 1
    if rng.random() < 0.2:
        scheduler.abort_client(1, bench.now)
        aborted |= {handle for handle in prompts if handle % 3 == 1}
    bench.run()
    for handle, prompt in prompts.items():
        key = handle % 3, handle
        want = expected_output(prompt, limits[handle], min_len=len(prompt) + min_tokens[handle])
        got = bench.outputs[key]
        finish = bench.finishes.get(key)
        if finish in (Finish.STOP, Finish.LENGTH):
            assert got == want, f"seed {seed}, request {handle}"
        else:
            assert got == want[: len(got)]
            assert finish == Finish.TIMEOUT or handle in aborted
    return bench


def _begin_anew(bench: Bench, request: Request, age_s: float) -> None:
    """Have a live request submitted again with the tokens that it has, under the same handle."""
    client = request.handle % 3
    bench.scheduler.abort(client, [request.handle], bench.now)
    bench.carry_on(msgspec.structs.replace(request, age_s=age_s), client)


def check_traffic(seed: int, num_stages: int = 1) -> None:
    bench = drive(seed, num_stages)

    assert bench.scheduler.num_waiting == 0
    assert bench.scheduler.num_running == 0
    for group in bench.scheduler.groups.values():
        assert group.cache.num_idle == group.cache.num_blocks
        assert not group.leaving
        assert not group.unanswered
    assert replay(bench.records) == []


@pytest.mark.parametrize("seed", range(24))
def test_random_traffic_keeps_every_invariant_leaks_nothing_and_replays(seed: int) -> None:
    check_traffic(seed)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_random_traffic_keeps_every_invariant_through_several_stages(
    seed: int, num_stages: int
) -> None:
    check_traffic(1000 * num_stages + seed, num_stages)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_much_random_traffic_keeps_every_invariant_through_several_stages(
    seed: int, num_stages: int
) -> None:
    check_traffic(2000 * num_stages + seed, num_stages)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24, 400))
def test_much_random_traffic_keeps_every_invariant_leaks_nothing_and_replays(seed: int) -> None:
    check_traffic(seed)
