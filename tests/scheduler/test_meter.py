"""What is measured, and that measuring never hurts."""

import math

import numpy as np
import pytest

from scheduler.meter import Histogram, Meter
from scheduler.request import Finish
from tests.scheduler.builders import CLIENT, Bench, make_request


def test_a_value_at_a_bound_belongs_to_its_bucket_however_it_is_added() -> None:
    values = [0.5, 1.0, 1.5, 2.0, 9.0]
    single, many = Histogram((1.0, 2.0)), Histogram((1.0, 2.0))
    for value in values:
        single.add(value)
    many.add_all(np.array(values))

    assert single.counts == many.counts == [2, 2, 1]
    assert single.sum == many.sum == sum(values)


def test_equal_values_are_counted_each() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.add_all(np.full(1000, 1.5))

    assert histogram.counts == [0, 1000, 0]
    assert histogram.sum == 1500.0


def test_case_99_an_impossible_value_is_taken_as_zero_and_counted() -> None:
    meter = Meter()
    meter.gaps(np.array([-0.5, 0.01]))
    meter.gaps(np.array([-0.5]))
    meter.took("plan", -1.0)

    assert meter.num_clipped == 3
    assert meter.gap_s.sum == pytest.approx(0.01)
    assert meter.phase_s["plan"].counts[0] == 1


def test_case_99_an_error_while_measuring_reaches_nobody() -> None:
    bench = Bench()
    bench.scheduler.meter.gap_s = None  # type: ignore[assignment]
    bench.submit(make_request(max_tokens=4))
    bench.run()

    assert bench.finishes == {(CLIENT, 0): Finish.LENGTH}
    assert bench.scheduler.meter.num_errors > 0
    assert "gaps" in bench.scheduler.meter.last_error


def test_each_token_is_measured_once_through_preemptions_with_plans_in_flight() -> None:
    bench = Bench(num_blocks=20, max_num_seqs=8)
    for handle in range(8):
        bench.submit(make_request(handle, prompt=8, max_tokens=24))
    bench.run()
    meter = bench.scheduler.meter

    assert bench.scheduler.counters.preemptions > 0
    assert sum(meter.first_token_s.counts) == 8
    assert sum(meter.gap_s.counts) == 8 * 23
    assert sum(meter.output_tokens.counts) == 8
    assert meter.output_tokens.sum == 8 * 24
    assert meter.whole_s.sum == pytest.approx(meter.queue_s.sum + meter.inference_s.sum)
    assert meter.inference_s.sum == pytest.approx(meter.prefill_s.sum + meter.decode_s.sum)
    assert meter.gap_s.sum == pytest.approx(meter.decode_s.sum)
    assert meter.num_errors == meter.num_clipped == 0


def test_requests_that_did_not_end_by_themselves_are_not_measured_whole() -> None:
    bench = Bench()
    bench.submit(make_request(0, max_tokens=50))
    bench.submit(make_request(1, max_tokens=3))
    for _ in range(5):
        bench.step()
    bench.scheduler.abort(CLIENT, [0], bench.now)

    assert sum(bench.scheduler.meter.first_token_s.counts) == 2
    assert sum(bench.scheduler.meter.whole_s.counts) == 1


def test_steps_are_measured_by_what_they_hold() -> None:
    bench = Bench(max_num_batched_tokens=16)
    bench.submit(make_request(0, prompt=4, max_tokens=6))
    bench.step()
    bench.submit(make_request(1, prompt=4, max_tokens=2))
    bench.step()
    bench.step()
    stats, meter = bench.scheduler.stats(), bench.scheduler.meter

    assert (stats.prefill_steps, stats.mixed_steps, stats.steps) == (1, 1, 3)
    assert meter.step_prefill_tokens.sum == 8
    assert meter.step_decode_tokens.sum == 1 + 2
    assert meter.step_tokens.sum == 11


def test_a_first_token_has_no_gap() -> None:
    meter = Meter()
    meter.gaps(np.array([math.nan, 0.2, math.nan]))

    assert sum(meter.gap_s.counts) == 1
    assert meter.num_errors == 0


@pytest.mark.parametrize("num_prompt", [40, 41, 48])
def test_the_parts_of_a_prompt_are_told_with_its_first_token(num_prompt: int) -> None:
    bench = Bench(max_num_batched_tokens=16, num_blocks=64)
    bench.submit(make_request(0, prompt=num_prompt, max_tokens=2))
    bench.submit(make_request(1, prompt=5, max_tokens=2))
    bench.run()
    long, short = bench.started[CLIENT, 0], bench.started[CLIENT, 1]

    assert long.chunk_tokens.sum() == num_prompt
    assert len(long.chunk_tokens) >= 3
    assert long.chunk_s.sum() == pytest.approx(long.prefill_s)
    assert len(short.chunk_tokens) == 0
