"""When refused requests may come back: times promised to them, and kept free for them.

A request that is refused is told in how many whole seconds to come back (HTTP's
`Retry-After`, RFC 9110 section 10.2.3, knows nothing finer). Such times are dealt out no
faster than requests are served, so that those who keep them find a place, and a request that
returns is known by what it asks for, since clients send the same body again. Some never
return: the share that does is learnt, and times are overbooked by it.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from hashlib import blake2b

import numpy as np

from scheduler.arrays import BoolArray, Float64Array, Int64Array
from scheduler.request import Request

CELLS_PER_S = 16
HORIZON_S = 600
"""Longest time that is promised. Later ones are told this, and nothing is kept for them."""
MAX_PROMISES = 16_384
"""Others are told when these will be served, and nothing is kept for them."""
EARLY_S = 0.1
LATE_S = 2.0
"""How much before and after its time a request that returns is still expected."""
_PLACES_AROUND = 3
_LEAST_BURST = 4.0
"""Fewer had better come one by one."""
_LEAST_SPACING = 0.5
"""Of two that come back, as a share of the time in which one place becomes free."""
_FIRST_SHARE_WEIGHT = 8.0
_LEAST_SHARE = 0.05
_FEW = 16
_KEEP = 0.95


def fingerprint(request: Request) -> bytes:
    """The same for a request that is sent again, whoever sends it."""
    head = repr((request.cache_salt, request.priority, request.sampling.max_tokens)).encode()
    tokens = np.ascontiguousarray(request.prompt, dtype="<i4")
    return blake2b(tokens.tobytes(), digest_size=16, key=blake2b(head).digest()).digest()


class Promises:
    """The times promised and not yet kept or missed. Seconds of the caller's clock."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, bytes]] = []
        """(when, number of the promise, whose), soonest first."""
        self._times: dict[bytes, deque[tuple[float, int]]] = {}
        """The same by whose they are."""
        self._booked_before: Int64Array = np.zeros(HORIZON_S * CELLS_PER_S + 1, dtype=np.int64)
        """How many were promised before each part of a second from `_origin` on, kept ones too."""
        self._origin = 0
        self._first_hope = 0
        """Seconds before which everything is booked out for whoever comes in this cell."""
        self._num_made = 0
        self._num_kept = self._num_told = _FIRST_SHARE_WEIGHT
        self._last: tuple[bytes, float, float] | None = None
        """Whose the last promise was, when it was made, and for when."""

    def __len__(self) -> int:
        return len(self._due)

    @property
    def share_kept(self) -> float:
        """Of those who were told a time, the share that came; recent ones count most."""
        return self._num_kept / self._num_told

    def forget_missed(self, now: float) -> None:
        """Those whose time is over count as not coming back."""
        missed = bisect_left(self._due, (now - LATE_S,))
        for when, number, whose in self._due[:missed]:
            self._drop(whose, when, number)
            self._learn(kept=False)
        del self._due[:missed]

    def is_expected(self, whose: bytes, now: float) -> bool:
        """Whether one of theirs is due."""
        times = self._times.get(whose)
        return times is not None and times[0][0] <= now + EARLY_S

    def next_due_s(self, now: float, count: int) -> Float64Array:
        """In how many seconds the first `count` of them come back, soonest first."""
        return np.array([max(when - now, 0.0) for when, _, _ in self._due[:count]])

    def keep(self, whose: bytes) -> None:
        """One of theirs came back, in time or sooner, and is no longer expected."""
        times = self._times.get(whose)
        if times is not None:
            when, number = times[0]
            self._drop(whose, when, number)
            del self._due[bisect_left(self._due, (when, number))]
            self._learn(kept=True)

    def make(
        self, whose: bytes, now: float, *, soonest_s: float, rate: float, burst: float = 0.0
    ) -> int:
        """In how many seconds to come back: the first time that is not booked out.

        Args:
            soonest_s: no place before that, whoever else comes back.
            rate: places that become free per second.
            burst: how many may come at once beside, since they can wait for each other.
        """
        if whose in self._times and self._times[whose][0][0] > now + EARLY_S:
            held = self._renewed(whose, now)
            if held is not None:
                return held
        if self._last is not None and self._last[:2] == (whose, now):
            return self._book(whose, now, self._last[2])  # outputs of one call come together
        if len(self._due) >= MAX_PROMISES:
            return max(1, min(HORIZON_S, math.ceil(max(soonest_s, MAX_PROMISES / rate))))
        seconds = self._first_free(now, soonest_s, rate, burst)
        if seconds is None:
            return HORIZON_S
        return self._book(whose, now, now + seconds)

    def _renewed(self, whose: bytes, now: float) -> int | None:
        """Somebody who came too soon keeps the place: the whole seconds that are left."""
        if self._last is not None and self._last[:2] == (whose, now):
            return None
        when, number = self._times[whose][0]
        seconds = max(1, math.ceil(when - now))
        del self._due[bisect_left(self._due, (when, number))]
        self._times[whose].popleft()
        self._enter(whose, now + seconds, number)
        return seconds

    def _book(self, whose: bytes, now: float, when: float) -> int:
        self._num_made += 1
        self._enter(whose, when, self._num_made)
        self._last = whose, now, when
        cell = int(when * CELLS_PER_S) - self._origin
        self._booked_before[max(0, cell + 1) :] += 1
        return round(when - now)

    def _enter(self, whose: bytes, when: float, number: int) -> None:
        insort(self._due, (when, number, whose))
        self._times.setdefault(whose, deque()).append((when, number))

    def _drop(self, whose: bytes, when: float, number: int) -> None:
        times = self._times[whose]
        times.remove((when, number))
        if not times:
            del self._times[whose]

    def _learn(self, *, kept: bool) -> None:
        self._num_kept = self._num_kept * _KEEP + kept
        self._num_told = self._num_told * _KEEP + 1.0

    def _first_free(self, now: float, soonest_s: float, rate: float, burst: float) -> int | None:
        """The least number of whole seconds after which few enough others come back."""
        self._move_to(int(now * CELLS_PER_S))
        pace = rate / max(self.share_kept, _LEAST_SHARE) / CELLS_PER_S
        soonest = max(1, math.ceil(soonest_s))
        first = max(soonest, self._first_hope)
        for count in (_FEW, HORIZON_S):  # mostly one of the first few will do
            seconds = np.arange(first, min(first + count, HORIZON_S))
            free = np.flatnonzero(self._have_room(seconds * CELLS_PER_S, pace, burst))
            if len(free):
                found = int(seconds[free[0]])
                break
        else:
            found = HORIZON_S
        if soonest <= max(1, self._first_hope):
            self._first_hope = found
        return found if found < HORIZON_S else None

    def _have_room(self, at: Int64Array, pace: float, burst: float) -> BoolArray:
        """Whether one more may come in each of these cells.

        Over some seconds, before and after, no more than `pace` per cell; over the time in which
        a few places become free, `burst` more; and if that is none, not two close together.
        """
        tight = math.ceil(_PLACES_AROUND / pace)
        wide = max(tight, 2 * CELLS_PER_S)
        can_burst = burst >= _LEAST_BURST
        near = 0 if can_burst else int(_LEAST_SPACING / pace)
        before, last = self._booked_before, len(self._booked_before) - 1

        def booked(begin: int, end: int) -> Int64Array:
            """From so many cells after each of `at` to before so many after it."""
            return before[np.minimum(at + end, last)] - before[np.maximum(at + begin, 0)]

        has_room: BoolArray = booked(-near, near) == 0
        for span, more in ((tight, burst if can_burst else 0.0), (wide, 0.0)):
            most = span * pace + more
            has_room &= booked(1 - span, 1) + 1 <= most
            has_room &= booked(0, span) + 1 <= most
        return has_room

    def _move_to(self, origin: int) -> None:
        """Forget what was booked before this cell."""
        before = self._booked_before
        last = len(before) - 1
        past = min(origin - self._origin, last)
        if past > 0:
            self._origin, self._first_hope = origin, 0
            before[: last + 1 - past] = before[past:] - before[past]
            before[last + 1 - past :] = before[last - past]
