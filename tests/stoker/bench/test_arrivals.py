"""Arrivals of an open loop."""

import math
import random
import statistics
from itertools import islice, pairwise

import pytest

from stoker.bench.arrivals import arrival_times


def gaps(rate: float, burstiness: float, seed: int = 1, count: int = 20_000) -> list[float]:
    times = islice(arrival_times(rate, burstiness, random.Random(seed)), count)
    return [later - earlier for earlier, later in pairwise(times)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(burstiness: float) -> None:
    found = gaps(rate=5.0, burstiness=burstiness)

    assert statistics.mean(found) == pytest.approx(0.2, rel=0.05)
    # Of a gamma distribution, variance / mean^2 is one by the shape.
    variation = statistics.variance(found) / statistics.mean(found) ** 2
    assert variation == pytest.approx(1 / burstiness, rel=0.1)


def test_the_gaps_of_a_poisson_process_are_exponential() -> None:
    found = gaps(rate=1.0, burstiness=1.0)

    for limit in (0.5, 1.0, 2.0):
        share = sum(gap > limit for gap in found) / len(found)
        assert share == pytest.approx(math.exp(-limit), abs=0.01)


def test_the_first_request_comes_at_once_and_one_seed_gives_one_load() -> None:
    first = list(islice(arrival_times(2.0, 1.0, random.Random(7)), 5))

    assert first[0] == 0.0
    assert first == list(islice(arrival_times(2.0, 1.0, random.Random(7)), 5))
    assert first != list(islice(arrival_times(2.0, 1.0, random.Random(8)), 5))


def test_an_infinite_rate_sends_everything_at_once() -> None:
    assert list(islice(arrival_times(math.inf, 1.0, random.Random(0)), 3)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (-1, 1), (math.nan, 1), (1, 0), (1, -2)])
def test_a_rate_or_burstiness_that_cannot_be_is_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        arrival_times(rate, burstiness, random.Random(0))
