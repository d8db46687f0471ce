"""Whether counts fit a distribution: Pearson's chi-square test."""

import numpy as np
import numpy.typing as npt

Z_AT_1E_4 = 3.719
"""Standard normal quantile that is exceeded once in ten thousand times."""


def assert_fits(counts: npt.NDArray[np.int64], expected: npt.NDArray[np.float64]) -> None:
    """Fail where counts so far from `expected` come up less than once in 10,000 times.

    Cells of expectation 0 must be empty. The least likely ones count as one cell, large
    enough that chi-square's approximation holds there (expecting 5 or more).
    """
    assert not counts[expected == 0].any(), f"impossible cells among {counts} came up"
    order = np.argsort(expected[expected > 0])
    counts, expected = counts[expected > 0][order], expected[expected > 0][order]
    pooled = int(np.searchsorted(expected.cumsum(), 5.0)) + 1
    counts = np.concatenate([[counts[:pooled].sum()], counts[pooled:]])
    expected = np.concatenate([[expected[:pooled].sum()], expected[pooled:]])
    statistic = float(((counts - expected) ** 2 / expected).sum())
    limit = critical_value(len(expected) - 1)
    assert statistic < limit, f"chi-square {statistic:.1f} is above {limit:.1f}"


def critical_value(degrees: int) -> float:
    """The chi-square value exceeded once in ten thousand times; 0.1 for no degree at all.

    Source: Wilson and Hilferty 1931, the cube root of chi-square over its degrees is nearly
    normal with mean 1 - 2/(9k) and variance 2/(9k). Within 2% of the tables from 2 degrees.
    """
    if degrees == 0:
        return 0.1
    share = 2 / (9 * degrees)
    return float(degrees * (1 - share + Z_AT_1E_4 * share**0.5) ** 3)
