"""Means and percentiles."""

import random

import pytest

from stoker.spread import percentile, spread_of, weighted_spread


@pytest.mark.parametrize(
    ("percent", "value"), [(0, 1), (1, 1), (50, 50), (95, 95), (99.5, 100), (100, 100)]
)
def test_percentiles_are_by_nearest_rank(percent: float, value: int) -> None:
    assert percentile(range(1, 101), percent) == value


def test_there_is_no_spread_of_nothing() -> None:
    assert percentile([], 50) is None
    assert spread_of([]) is None
    assert weighted_spread([(3.0, 0.0)]) is None


def test_a_spread_has_the_percentiles_of_its_values_in_any_order() -> None:
    values = [float(value) for value in range(1, 1001)]
    random.Random(0).shuffle(values)

    spread = spread_of(values)

    assert spread is not None
    assert (spread.count, spread.min, spread.max) == (1000, 1, 1000)
    assert (spread.p50, spread.p90, spread.p95, spread.p99) == (500, 900, 950, 990)
    assert spread.mean == pytest.approx(500.5)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 10, 19, 100, 101])
def test_a_spread_agrees_with_the_percentile_of_each_share(count: int) -> None:
    values = [value**1.5 for value in range(count)]

    spread = spread_of(values)

    assert spread is not None
    for percent in (50, 90, 95, 99):
        assert getattr(spread, f"p{percent}") == percentile(values, percent)


@pytest.mark.parametrize("weight", [0.1, 0.5, 1.0, 3.0])
def test_weights_of_one_size_change_nothing_but_say_how_often_a_value_counts(
    weight: float,
) -> None:
    values = [float(value) for value in range(1, 101)]

    even = weighted_spread([(value, weight) for value in values])
    heavy = weighted_spread([(1.0, 9 * weight), (2.0, weight)])

    plain = spread_of(values)
    assert even is not None
    assert plain is not None
    assert (even.p50, even.p90, even.p95, even.p99) == (50, 90, 95, 99)
    assert even.mean == pytest.approx(plain.mean)
    assert heavy is not None
    assert (heavy.p90, heavy.p95, heavy.mean) == (1.0, 2.0, pytest.approx(1.1))
