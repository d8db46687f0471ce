"""A request that comes with output goes on as if this scheduler had computed it."""

import math

import msgspec
import numpy as np
import pytest

from scheduler.arrays import int32
from scheduler.replay import replay
from scheduler.request import Finish, Rejection, Request
from tests.scheduler.builders import CLIENT, Bench, make_request
from tests.scheduler.scripted import END, expected_output

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def with_output(request: Request, output: list[int], age_s: float = 0.0) -> Request:
    return msgspec.structs.replace(request, output=int32(output), age_s=age_s)


def answer(bench: Bench, request: Request) -> tuple[list[int], Finish]:
    bench.submit(request)
    bench.run()
    key = CLIENT, request.handle
    return bench.outputs[key], bench.finishes[key]


@pytest.mark.parametrize("cut", range(1, 30, 4))
@pytest.mark.parametrize("budget", [16, 64])
def test_from_any_cut_it_says_what_the_whole_one_says(cut: int, budget: int) -> None:
    request = make_request(1, PROMPT, max_tokens=30)
    whole, finish = answer(Bench(), request)
    assert whole == expected_output(PROMPT, len(PROMPT) + 30, ends=False)

    bench = Bench(max_num_batched_tokens=budget)
    rest = answer(bench, with_output(request, whole[:cut]))

    assert rest == (whole, finish)
    assert replay(bench.records) == []


def test_only_new_tokens_are_sent() -> None:
    whole = expected_output(PROMPT, len(PROMPT) + 8, ends=False)
    bench = Bench()
    bench.submit(with_output(make_request(1, PROMPT), whole[:5]))
    assert bench.outputs[CLIENT, 1] == whole[:5]

    bench.run()

    assert bench.scheduler.counters.output_tokens == 3
    assert bench.scheduler.counters.continued == 1


def test_what_it_has_counts_for_max_tokens_and_the_context() -> None:
    whole = expected_output(PROMPT, 40, ends=False)
    request = make_request(1, PROMPT, max_tokens=None)
    assert answer(Bench(max_model_len=40), with_output(request, whole[:20])) == (
        whole,
        Finish.LENGTH,
    )


def test_min_tokens_guard_the_output_not_what_came_since() -> None:
    """The end token that would be its 4th is passed over with min_tokens=5, wherever it is cut."""
    prompt = prompt_that_ends_at(4)
    request = make_request(1, prompt, max_tokens=12, ends=True, min_tokens=5)
    whole, _ = answer(Bench(), request)
    assert whole[3] == END
    assert len(whole) > 4

    for cut in range(1, len(whole)):
        assert answer(Bench(), with_output(request, whole[:cut]))[0] == whole


def prompt_that_ends_at(length: int) -> list[int]:
    """One whose answer has its first end token there."""
    return next(
        [first, second]
        for first in range(1, 50)
        for second in range(1, 50)
        if END in (said := expected_output([first, second], 14, ends=False))
        and said.index(END) == length - 1
    )


@pytest.mark.parametrize(
    ("finish", "request_", "output"),
    [
        (Finish.LENGTH, make_request(1, PROMPT, max_tokens=3), [7, 8, 9]),
        (Finish.LENGTH, make_request(1, PROMPT, max_tokens=3), [7, 8, 9, 10]),
        (Finish.LENGTH, make_request(1, PROMPT, max_tokens=None), [7] * 30),
        (Finish.STOP, make_request(1, PROMPT, ends=True), [7, END]),
        (Finish.STOP, make_request(1, PROMPT, stop_token_ids=[8]), [7, 8]),
    ],
)
def test_one_that_has_all_its_tokens_ends_at_once(
    finish: Finish, request_: Request, output: list[int]
) -> None:
    bench = Bench(max_model_len=40)

    bench.submit(with_output(request_, output))

    assert bench.finishes[CLIENT, 1] is finish
    assert bench.outputs[CLIENT, 1] == output
    assert bench.scheduler.is_idle
    assert bench.scheduler.counters.accepted == 1
    assert sum(bench.scheduler.counters.finished.values()) == 1
    assert replay(bench.records) == []


def test_one_that_fits_no_pool_any_more_ends_with_what_it_has() -> None:
    """As if its group had been lost and a smaller one were left."""
    bench = Bench(num_blocks=3)
    bench.submit(with_output(make_request(1, PROMPT, max_tokens=9), [7, 8]))
    assert bench.finishes[CLIENT, 1] is Finish.LENGTH

    empty = Bench(num_groups=0)
    empty.submit(with_output(make_request(1, PROMPT, max_tokens=9), [7, 8]))
    assert not empty.finishes
    empty.add_group(0, 3)
    assert empty.finishes[CLIENT, 1] is Finish.LENGTH


def test_a_full_queue_does_not_refuse_it() -> None:
    bench = Bench(max_waiting_requests=2, max_num_seqs=1, max_waiting_tokens=30)
    for handle in range(2):
        assert bench.submit(make_request(handle)) is None
    refused = bench.submit(make_request(2))
    assert isinstance(refused, Rejection)
    assert refused.reason == "queue_full"

    assert bench.submit(with_output(make_request(3, PROMPT), [1, 2])) is None
    assert bench.submit(with_output(make_request(4, PROMPT), [], age_s=0.5)) is None
    bench.run()

    assert len(bench.finishes) == 4


def test_it_keeps_its_place_before_those_that_came_later() -> None:
    bench = Bench(max_num_seqs=1)
    bench.now = 100.0
    for handle in range(3):
        bench.submit(make_request(handle, max_tokens=1))
    bench.submit(with_output(make_request(7, max_tokens=2), [5], age_s=30.0))
    bench.submit(with_output(make_request(8, max_tokens=1), [], age_s=50.0))

    bench.run()

    assert list(bench.finishes) == [(CLIENT, handle) for handle in (8, 7, 0, 1, 2)]


def test_its_priority_counts_as_before() -> None:
    bench = Bench(max_num_seqs=1, policy="priority", priority_ageing_s=60.0)
    bench.now = 100.0
    bench.submit(make_request(0, max_tokens=1, priority=0))
    bench.submit(with_output(make_request(1, max_tokens=2, priority=1), [5], age_s=50.0))
    bench.submit(with_output(make_request(2, max_tokens=2, priority=1), [5], age_s=70.0))

    bench.run()

    assert list(bench.finishes) == [(CLIENT, handle) for handle in (2, 0, 1)]


def test_its_deadline_counts_from_its_first_arrival() -> None:
    bench = Bench()
    bench.now = 100.0
    request = make_request(1, PROMPT, max_tokens=300, timeout_s=30.0)
    bench.submit(with_output(request, [4, 4], age_s=20.0))
    assert bench.scheduler.next_deadline() == 110.0
    bench.submit(with_output(msgspec.structs.replace(request, handle=2), [4], age_s=31.0))

    bench.take(bench.scheduler.expire(100.0))

    assert bench.finishes == {(CLIENT, 2): Finish.TIMEOUT}
    assert bench.outputs[CLIENT, 2] == [4]


def test_figures_of_a_first_token_are_not_told_twice() -> None:
    bench = Bench()
    bench.now = 50.0
    bench.submit(with_output(make_request(1, PROMPT), [4, 4], age_s=20.0))
    bench.run()

    meter = bench.scheduler.meter
    assert bench.started == {}
    assert meter.first_token_s.sum == 0.0
    assert meter.gap_s.sum == pytest.approx(bench.now - 50.0)
    assert not math.isnan(meter.gap_s.sum)
    assert bench.scheduler.counters.queried_tokens == 0
    assert bench.scheduler.counters.recomputed_tokens == len(PROMPT) + 2


def test_one_without_a_token_is_measured_from_its_first_arrival() -> None:
    bench = Bench()
    bench.now = 50.0
    bench.submit(with_output(make_request(1, PROMPT), [], age_s=20.0))
    bench.run()

    assert bench.started[CLIENT, 1].queue_s >= 20.0
    assert bench.scheduler.meter.first_token_s.sum >= 20.0


def test_blocks_of_its_output_are_found_in_the_cache() -> None:
    """It comes back to an engine that has not lost them: only the connection was."""
    bench = Bench()
    request = make_request(1, PROMPT, max_tokens=40)
    bench.submit(request)
    for _ in range(24):
        bench.step()
    said = bench.outputs[CLIENT, 1]
    bench.scheduler.abort_client(CLIENT, bench.now)
    before = bench.workers[0].computed_tokens

    bench.carry_on(request)
    bench.run()

    assert bench.outputs[CLIENT, 1] == expected_output(PROMPT, len(PROMPT) + 40, ends=False)
    computed = bench.workers[0].computed_tokens - before
    assert computed <= 40 - len(said) + 2 * bench.scheduler.config.block_size


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (with_output(make_request(1), [50]), "output"),
        (with_output(make_request(1), [3, -1]), "output"),
        (with_output(make_request(1), [], age_s=-1.0), "age_s"),
        (with_output(make_request(1), [], age_s=math.nan), "age_s"),
        (with_output(make_request(1), [], age_s=math.inf), "age_s"),
    ],
)
def test_what_cannot_be_is_refused(request_: Request, param: str) -> None:
    bench = Bench()
    refused = bench.submit(request_)

    assert isinstance(refused, Rejection)
    assert (refused.reason, refused.param) == ("invalid", param)
    assert bench.scheduler.is_idle


def test_a_prompt_that_is_too_long_is_still_too_long() -> None:
    bench = Bench(max_model_len=40)
    refused = bench.submit(with_output(make_request(1, prompt=40), [], age_s=3.0))

    assert isinstance(refused, Rejection)
    assert refused.reason == "too_long"


def test_the_journal_keeps_it() -> None:
    bench = Bench()
    bench.submit(with_output(make_request(1, PROMPT), [4, 5], age_s=2.5))
    (submitted,) = [r for r in bench.records if type(r).__name__ == "Submitted"]

    request = submitted.request  # type: ignore[union-attr]
    assert (request.output.tolist(), request.age_s) == ([4, 5], 2.5)
    assert np.array_equal(request.prompt, PROMPT)
