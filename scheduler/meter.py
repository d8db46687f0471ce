"""How long requests, tokens and steps took, and what steps were made of, as histograms.

Measuring must never hurt: an impossible value (time that ran backwards) is taken as zero and
counted, and an error in here is counted and kept for the log, never raised (cases: a negative
counter step kills the engine's loop).
"""

import functools
import math
from bisect import bisect_left
from collections.abc import Callable
from typing import Concatenate, ParamSpec

import numpy as np

from scheduler.arrays import Float64Array
from scheduler.request import Finish
from scheduler.sequences import Sequence

# fmt: off
LATENCY_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0, 300.0, 1000.0,
)
"""Of requests."""
GAP_S = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05,
    0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0,
)
"""Between tokens: closest where a reader begins to notice."""
PHASE_S = (
    0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05,
    0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)
"""Of the parts of a step."""
TOKENS = tuple(float(2**power) for power in range(18))
# fmt: on

PHASES = ("plan", "wire", "forward", "sample", "apply")


class Histogram:
    """Counts of values by bucket; a bucket holds what is at most its bound."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """By bucket, the last one of values above all bounds."""
        self.sum = 0.0
        self.num_clipped = 0
        """Negative values, taken as zero."""
        self._edges: Float64Array = np.array(bounds)

    def add(self, value: float, times: int = 1) -> None:
        if value < 0.0:
            self.num_clipped += times
            value = 0.0
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def add_all(self, values: Float64Array) -> None:
        """Many at once, less those that are NaN; cheap when all are the same, as gaps of one step
        often are."""
        if not len(values):
            return
        if np.count_nonzero(values == values[0]) == len(values):
            self.add(float(values[0]), len(values))
            return
        low = float(values.min())
        if math.isnan(low):
            self.add_all(values[~np.isnan(values)])
            return
        if low < 0.0:
            self.num_clipped += int((values < 0.0).sum())
            values = np.maximum(values, 0.0)
        buckets = np.searchsorted(self._edges, values)
        more = np.bincount(buckets, minlength=len(self.counts)).tolist()
        self.counts = [old + new for old, new in zip(self.counts, more, strict=True)]
        self.sum += float(values.sum())


_Given = ParamSpec("_Given")
_Measure = Callable[Concatenate["Meter", _Given], None]


def _harmless(measure: _Measure[_Given]) -> _Measure[_Given]:
    @functools.wraps(measure)
    def guarded(meter: "Meter", /, *args: _Given.args, **kwargs: _Given.kwargs) -> None:
        try:
            measure(meter, *args, **kwargs)
        except Exception as error:
            meter.num_errors += 1
            meter.last_error = f"{measure.__name__}: {error!r}"

    return guarded


class Meter:
    """The histograms of one engine core, since it began. No method raises."""

    def __init__(self) -> None:
        self.first_token_s = Histogram(LATENCY_S)
        self.gap_s = Histogram(GAP_S)
        self.queue_s = Histogram(LATENCY_S)
        self.prefill_s = Histogram(LATENCY_S)
        self.decode_s = Histogram(LATENCY_S)
        self.inference_s = Histogram(LATENCY_S)
        self.whole_s = Histogram(LATENCY_S)
        self.per_token_s = Histogram(GAP_S)
        self.prompt_tokens = Histogram(TOKENS)
        self.output_tokens = Histogram(TOKENS)
        self.step_prefill_tokens = Histogram(TOKENS)
        self.step_decode_tokens = Histogram(TOKENS)
        self.step_tokens = Histogram(TOKENS)
        self.phase_s = {phase: Histogram(PHASE_S) for phase in PHASES}
        self.num_errors = 0
        self.last_error = ""

    @property
    def num_clipped(self) -> int:
        """Impossible values that were taken as zero."""
        mine = [value for value in vars(self).values() if isinstance(value, Histogram)]
        return sum(each.num_clipped for each in [*mine, *self.phase_s.values()])

    @_harmless
    def planned(self, num_prefill: int, num_decode: int) -> None:
        """A step goes out, made of so many tokens."""
        self.step_prefill_tokens.add(num_prefill)
        self.step_decode_tokens.add(num_decode)
        self.step_tokens.add(num_prefill + num_decode)

    @_harmless
    def took(self, phase: str, seconds: float) -> None:
        """One of `PHASES` of a step."""
        self.phase_s[phase].add(seconds)

    @_harmless
    def gaps(self, gaps_s: Float64Array) -> None:
        """Time since the token before, of each token of a step; NaN where it was the first."""
        self.gap_s.add_all(gaps_s)

    @_harmless
    def started(self, sequence: Sequence, now: float) -> None:
        """A sequence has its first token."""
        assert sequence.started_at is not None
        sequence.first_token_at = now
        self.first_token_s.add(now - sequence.arrival)
        self.queue_s.add(sequence.started_at - sequence.arrival)
        self.prefill_s.add(now - sequence.started_at)

    @_harmless
    def ended(self, sequence: Sequence, finish: Finish, now: float) -> None:
        """A sequence has ended, its tokens up to date; only whole answers are measured."""
        if finish not in (Finish.STOP, Finish.LENGTH) or sequence.first_token_at is None:
            return
        assert sequence.started_at is not None
        num_output = len(sequence.tokens) - sequence.num_prompt
        self.whole_s.add(now - sequence.arrival)
        self.inference_s.add(now - sequence.started_at)
        self.decode_s.add(now - sequence.first_token_at)
        if num_output > 1:
            self.per_token_s.add((now - sequence.first_token_at) / (num_output - 1))
        self.prompt_tokens.add(sequence.num_prompt)
        self.output_tokens.add(num_output)
