"""May a request enter the queue; and if not, when shall it come back.

Two counts bound the queue, and, if `max_queue_s` says so, the time that a new request is
expected to wait. Both are judged with those in mind who were told to come back about now.
"""

import math
from collections.abc import Collection

import numpy as np

from scheduler.arrays import Float64Array
from scheduler.config import SchedulerConfig
from scheduler.group import Group
from scheduler.promises import Promises, fingerprint
from scheduler.request import Rejection, Request
from scheduler.waiting import WaitingQueue

_BLIND_RETRY_S = 5.0
"""What to say while nothing was measured yet, or nothing computes."""
_KEEP = 0.95
_MAX_HELD = 64
"""Of those about to come back, how many are looked at."""
CAUTION = 0.5
"""Share of the expected places that is counted on."""


class QueueGate:
    """Knows how fast requests pass, and whom it told to come back."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._promises = Promises()
        self._stays = 0.0
        self._sum_s = 0.0

    @property
    def num_promised(self) -> int:
        """Refused requests that are expected back."""
        return len(self._promises)

    def left(self, stay_s: float) -> None:
        """A request gave up its place after so many seconds."""
        self._stays = self._stays * _KEEP + 1.0
        self._sum_s = self._sum_s * _KEEP + stay_s

    def check(
        self, request: Request, waiting: WaitingQueue, groups: Collection[Group], now: float
    ) -> Rejection | None:
        """Why the request may not wait, with the time to come back; None if it may."""
        promises = self._promises
        if self._config.max_queue_s is None and not len(promises):
            why = self._too_many(request, waiting, 0)
            if why is None:
                return None
        promises.forget_missed(now)
        whose = fingerprint(request)
        outlook = Outlook(self._config, waiting, groups, self._rate(groups))
        is_expected = promises.is_expected(whose, now)
        held = 0 if is_expected else self._num_held(outlook, now)
        why = self._too_many(request, waiting, held) or self._too_long(outlook, held)
        if why is None or is_expected:
            promises.keep(whose)
        if why is None:
            return None
        return Rejection(
            handle=request.handle,
            reason="queue_full",
            message=why,
            retry_after_s=self._retry_after_s(whose, request, waiting, outlook, now),
        )

    def _num_held(self, outlook: "Outlook", now: float) -> int:
        """Places to keep free for those who come back before enough others are free."""
        due_s = self._promises.next_due_s(now, _MAX_HELD)
        if not len(due_s):
            return 0
        come = np.arange(1, len(due_s) + 1) * self._promises.share_kept
        return max(0, math.ceil(float((come - outlook.num_freed(due_s)).max()) - 1e-9))

    def _rate(self, groups: Collection[Group]) -> float | None:
        """Places that become free per second, by Little's law; None: nothing is known."""
        running = sum(group.num_running for group in groups)
        if not self._stays or not running:
            return None
        return running / max(self._sum_s / self._stays, 1e-6)

    def _too_many(self, request: Request, waiting: WaitingQueue, held: int) -> str | None:
        config = self._config
        if len(waiting) + held >= config.max_waiting_requests:
            back = f" and {held} refused ones are about to come back" if held else ""
            return (
                f"{len(waiting)} requests wait already{back}, the limit is "
                f"max_waiting_requests={config.max_waiting_requests}. Try again later."
            )
        num_prompt = len(request.prompt)
        if waiting.num_tokens + num_prompt > config.max_waiting_tokens and len(waiting):
            return (
                f"{waiting.num_tokens} prompt tokens wait already and this prompt has "
                f"{num_prompt}; the limit is max_waiting_tokens="
                f"{config.max_waiting_tokens}. Try again later."
            )
        return None

    def _too_long(self, outlook: "Outlook", held: int) -> str | None:
        most = self._config.max_queue_s
        if most is None:
            return None
        wait_s = outlook.wait_s(held)
        if wait_s is None or wait_s <= most:
            return None
        return (
            f"this request would wait about {wait_s:.2g} s for its turn, the limit is "
            f"max_queue_s={most:g}. Try again later."
        )

    def _retry_after_s(
        self,
        whose: bytes,
        request: Request,
        waiting: WaitingQueue,
        outlook: "Outlook",
        now: float,
    ) -> float:
        if outlook.rate is None:
            return _BLIND_RETRY_S
        config = self._config
        surplus = len(waiting) + 1 - config.max_waiting_requests
        tokens = waiting.num_tokens + len(request.prompt) - config.max_waiting_tokens
        soonest_s = max(surplus / outlook.rate, tokens * outlook.token_s, 0.0)
        if config.max_queue_s is not None:
            soonest_s = max(soonest_s, (outlook.wait_s(0) or 0.0) - config.max_queue_s)
        return self._promises.make(
            whose, now, soonest_s=soonest_s, rate=outlook.rate * BOOKED_SHARE
        )


BOOKED_SHARE = 0.9
"""Share of the places becoming free that is promised; the rest makes up for bad luck."""


class Outlook:
    """How long things will take, from what runs and waits at this moment."""

    def __init__(
        self,
        config: SchedulerConfig,
        waiting: WaitingQueue,
        groups: Collection[Group],
        rate: float | None,
    ) -> None:
        self._config, self._waiting, self._groups = config, waiting, groups
        self.rate = rate
        """Places that become free per second."""

    def num_freed(self, within_s: Float64Array) -> Float64Array:
        """How many places become free in so many seconds from now, rather too few."""
        ends = [group.certain_ends() for group in self._groups]
        certain = np.searchsorted(np.sort(np.concatenate(ends)) if ends else [], within_s, "right")
        return np.maximum(certain, within_s * (self.rate or 0.0) * CAUTION)

    @property
    def token_s(self) -> float:
        """Seconds per prompt token while steps are full, over all groups."""
        budget = self._config.max_num_batched_tokens
        full = [group.step_time.predict(budget) for group in self._groups]
        return sum(full) / len(full) ** 2 / budget if full else 0.0

    def wait_s(self, held: int) -> float | None:
        """From arrival to the first slice of the prompt, behind all that wait and `held` more.

        None: nothing computes, or nothing was measured yet.
        """
        if not self._groups:
            return None
        free = sum(g.running.num_free for g in self._groups if not g.is_short_of_blocks)
        ahead = len(self._waiting) + held + 1 - free
        tokens = self._waiting.num_tokens + sum(group.backlog for group in self._groups)
        compute_s = tokens * self.token_s
        if ahead <= 0:
            return compute_s
        place_s = self._certain_s(ahead)
        if self.rate is not None:
            average_s = ahead / self.rate
            place_s = average_s if place_s is None else min(place_s, average_s)
        return None if place_s is None else max(compute_s, place_s)

    def _certain_s(self, ahead: int) -> float | None:
        """When `ahead` places are free for certain, since as many sequences reach their limit."""
        ends = np.concatenate([group.certain_ends() for group in self._groups])
        if ahead > len(ends):
            return None
        return float(np.partition(ends, ahead - 1)[ahead - 1])
