"""How long things will take, from what runs and waits at this moment and what was learnt."""

import math
from collections.abc import Collection
from functools import cached_property

import numpy as np

from scheduler.arrays import Float64Array
from scheduler.group import Group
from scheduler.waiting import WaitingQueue

_KEEP = 0.95
_BLIND_STAY_S = 10.0
"""How long a place is taken, while nothing was measured yet."""


class StayTime:
    """How long a running sequence keeps its place, on average; later ones count more.

    Time that places are still taken for counts as well: the first ones to end are the short
    ones, and what they alone say would be too little.
    """

    def __init__(self) -> None:
        self._num_left = 0.0
        self._taken_s = 0.0
        self._counted_to = math.inf

    def pass_time(self, num_running: int, now: float) -> None:
        """So many places were taken up to now. Call it before their number changes."""
        self._taken_s += num_running * max(now - self._counted_to, 0.0)
        self._counted_to = now

    def left(self) -> None:
        """A place became free."""
        self._num_left = self._num_left * _KEEP + 1.0
        self._taken_s *= _KEEP

    @property
    def mean_s(self) -> float | None:
        """None: nobody has left yet."""
        return self._taken_s / self._num_left if self._num_left and self._taken_s else None


class Outlook:
    """One moment's forecast. A *place* is a slot whose sequence finds blocks as well."""

    def __init__(
        self, waiting: WaitingQueue, groups: Collection[Group], stay_s: float | None, budget: int
    ) -> None:
        self._waiting, self._groups = waiting, groups
        self._budget = budget
        """Tokens of a full step."""
        self.num_free = sum(g.running.num_free for g in groups if not g.is_short_of_blocks)
        self.num_running = sum(group.num_running for group in groups)
        self.is_blind = stay_s is None and not self._ends_s.any()
        if stay_s is None:
            stay_s = _BLIND_STAY_S if self.is_blind else float(self._ends_s.mean())
        self.stay_s = stay_s

    @property
    def rate(self) -> float:
        """Places that become free per second while as many run as now."""
        return max(1, self.num_running) / self.stay_s

    @cached_property
    def _ends_s(self) -> Float64Array:
        """In how many seconds the running sequences reach their limits, soonest first."""
        ends = [np.empty(0), *(group.certain_ends() for group in self._groups)]
        return np.sort(np.concatenate(ends))

    def num_freed(self, within_s: Float64Array) -> Float64Array:
        """How many places are certain to become free in so many seconds from now."""
        return np.searchsorted(self._ends_s, within_s, "right").astype(np.float64)

    @property
    def token_s(self) -> float:
        """Seconds per prompt token while steps are full, over all groups."""
        full = [group.step_time.predict(self._budget) for group in self._groups]
        return sum(full) / len(full) ** 2 / self._budget if full else 0.0

    def wait_s(self, held: int) -> float:
        """From arrival to the first slice of the prompt, behind all that wait and `held` more.

        0 while nothing computes or nothing was measured, so that nobody is refused for it.
        """
        tokens = self._waiting.num_tokens + sum(group.backlog for group in self._groups)
        compute_s = tokens * self.token_s
        ahead = len(self._waiting) + held + 1 - self.num_free
        if ahead <= 0 or self.is_blind or not self._groups:
            return compute_s
        place_s = ahead / self.rate
        if ahead <= len(self._ends_s) and self._ends_s.any():
            place_s = min(place_s, float(self._ends_s[ahead - 1]))
        return max(compute_s, place_s)
