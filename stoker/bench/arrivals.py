"""When the requests of an open-loop load arrive, whatever the server does meanwhile."""

import math
import random
from collections.abc import Iterator
from itertools import repeat


def arrival_times(rate: float, burstiness: float, chance: random.Random) -> Iterator[float]:
    """Seconds after the start of each request, without end; the first comes at once.

    Gaps are drawn from a gamma distribution of mean 1/rate whose shape is the burstiness: 1 is a
    Poisson process, less comes in bursts, more comes evenly.

    Args:
        rate: requests per second; infinity: all at once.
    Raises:
        ValueError: a rate or burstiness that is not above 0.
    """
    if not rate > 0:
        raise ValueError(
            f"the request rate is {rate:g}; it must be above 0, or inf for all at once"
        )
    if not 0 < burstiness < math.inf:
        raise ValueError(
            f"burstiness is {burstiness:g}; it must be above 0 (1 is a Poisson process)"
        )
    if math.isinf(rate):
        return repeat(0.0)
    return _gamma_times(rate, burstiness, chance)


def _gamma_times(rate: float, burstiness: float, chance: random.Random) -> Iterator[float]:
    at = 0.0
    while True:
        yield at
        at += chance.gammavariate(burstiness, 1.0 / (rate * burstiness))
