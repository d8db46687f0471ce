"""How measured values spread: their mean and percentiles, by nearest rank."""

from collections.abc import Iterable, Sequence

from msgspec import Struct

PERCENTS = (50, 90, 95, 99)
"""What is shown of every spread."""


class Spread(Struct, frozen=True, kw_only=True):
    """Mean, percentiles and the two ends, all in the unit of the values."""

    count: int
    """Values measured."""
    mean: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def percentile(ordered: Sequence[float], percent: float) -> float | None:
    """The nearest-rank percentile of values in rising order; None of none.

    That is the smallest value that at least `percent` of the values do not exceed.
    """
    if not ordered:
        return None
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(int(rank), 1) - 1]


def spread_of(values: Iterable[float]) -> Spread | None:
    """How `values` spread, each counting once; None of none."""
    return weighted_spread([(value, 1.0) for value in values])


def weighted_spread(weighted: Iterable[tuple[float, float]]) -> Spread | None:
    """How values spread of which each counts as often as its weight says; None of none."""
    ordered = sorted((value, weight) for value, weight in weighted if weight > 0)
    if not ordered:
        return None
    total = sum(weight for _, weight in ordered)
    marks = iter(PERCENTS)
    mark = next(marks, None)
    found: dict[str, float] = {}
    reached = 0.0
    for value, weight in ordered:
        reached += weight
        # The slack is for weights such as 0.1, whose sum is not exact.
        while mark is not None and reached >= total * (mark / 100) - 1e-9 * total:
            found[f"p{mark}"] = value
            mark = next(marks, None)
    return Spread(
        count=len(ordered),
        mean=sum(value * weight for value, weight in ordered) / total,
        min=ordered[0][0],
        max=ordered[-1][0],
        **found,
    )
