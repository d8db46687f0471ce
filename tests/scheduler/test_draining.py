"""Groups that are about to leave: nothing starts there, nothing is lost there."""

from scheduler.replay import replay
from tests.scheduler.builders import CLIENT, Bench, make_request
from tests.scheduler.scripted import expected_output

PROMPT_LEN, OUTPUT_LEN = 9, 20


def bench_with_two_busy_groups(**settings: object) -> Bench:
    bench = Bench(num_groups=2, **settings)  # type: ignore[arg-type]  # a test's own words
    for handle in range(6):
        bench.submit(make_request(handle, prompt=PROMPT_LEN, max_tokens=OUTPUT_LEN))
    for _ in range(4):
        for group in (0, 1):
            bench.step(group)
    assert all(bench.scheduler.groups[group].num_running for group in (0, 1))
    return bench


def assert_all_whole(bench: Bench, handles: range) -> None:
    for handle in handles:
        prompt = make_request(handle, prompt=PROMPT_LEN).prompt.tolist()
        wanted = expected_output(prompt, PROMPT_LEN + OUTPUT_LEN, ends=False)
        assert bench.outputs[CLIENT, handle] == wanted


def test_what_runs_in_a_draining_group_ends_there_and_what_comes_starts_elsewhere() -> None:
    bench = bench_with_two_busy_groups()
    bench.take(bench.scheduler.drain_group(1, bench.now))
    for handle in range(6, 12):
        bench.submit(make_request(handle, prompt=PROMPT_LEN, max_tokens=OUTPUT_LEN))
    started_there = 0
    while not bench.scheduler.is_idle:
        plans = [bench.step(group) for group in (0, 1)]
        started_there += len(plans[1].admitted) if plans[1] else 0

    assert started_there == 0
    assert_all_whole(bench, range(12))
    assert not bench.scheduler.has_work(1)


def test_what_still_runs_when_its_time_is_over_goes_on_in_another_group() -> None:
    bench = bench_with_two_busy_groups()
    bench.take(bench.scheduler.drain_group(1, bench.now))
    bench.step(1)
    bench.lose_group(1)
    bench.run()

    assert_all_whole(bench, range(6))


def test_a_draining_group_that_stays_after_all_starts_sequences_again() -> None:
    bench = bench_with_two_busy_groups()
    bench.take(bench.scheduler.drain_group(1, bench.now))
    bench.run()
    bench.take(bench.scheduler.drain_group(1, bench.now, drains=False))
    bench.submit(make_request(20, prompt=PROMPT_LEN, max_tokens=OUTPUT_LEN))
    bench.submit(make_request(21, prompt=PROMPT_LEN, max_tokens=OUTPUT_LEN))
    for group in (0, 1):
        bench.step(group)

    assert bench.scheduler.groups[1].num_running == 1


def test_waiting_requests_alone_give_a_draining_group_no_work() -> None:
    bench = Bench(num_groups=2)
    bench.take(bench.scheduler.drain_group(1, bench.now))
    bench.submit(make_request(1))

    assert bench.scheduler.has_work(0)
    assert not bench.scheduler.has_work(1)
    assert bench.plan(1) is None


def test_limits_are_those_of_the_groups_that_stay() -> None:
    bench = Bench(num_blocks=10)
    bench.add_group(1, 60)
    bench.take(bench.scheduler.drain_group(1, bench.now))

    rejection = bench.submit(make_request(1, prompt=50))

    assert rejection is not None
    assert bench.scheduler.max_len == 40


def test_a_replay_drains_at_the_same_moments() -> None:
    bench = bench_with_two_busy_groups()
    bench.take(bench.scheduler.drain_group(1, bench.now))
    bench.step(1)
    bench.take(bench.scheduler.drain_group(1, bench.now, drains=False))
    bench.run()

    assert replay(bench.records) == []
