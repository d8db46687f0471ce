"""May a request enter the queue; and if not, when shall it come back.

Two counts bound the queue, and, if `max_queue_s` says so, the time that a new request is
expected to wait. Both are judged with those in mind who were told to come back about now.
"""

from collections.abc import Collection

import numpy as np

from scheduler.config import SchedulerConfig
from scheduler.group import Group
from scheduler.outlook import Outlook, StayTime
from scheduler.promises import Promises, fingerprint
from scheduler.request import Rejection, Request
from scheduler.waiting import WaitingQueue

_BOOKED_SHARE = 0.7
"""Share of the places becoming free that is promised. The rest makes up for bad luck: places
become free at random, and who comes back as told shall find one."""
_LONG_STAY = 2.0
"""Times the average: how long a request may keep its place."""
_SPARE = 1
"""Places kept beyond what should suffice, while somebody is due."""
_BURST_SHARE = 1 / 8
"""Of those that may wait: how many may come back at once, and wait for one another."""
_MAX_HELD = 64
"""Of those about to come back, how many are looked at."""


class QueueGate:
    """Knows how fast requests pass, and whom it told to come back."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._promises = Promises()
        self.stay_time = StayTime()

    @property
    def num_promised(self) -> int:
        """Refused requests that are expected back."""
        return len(self._promises)

    def check(
        self, request: Request, waiting: WaitingQueue, groups: Collection[Group], now: float
    ) -> Rejection | None:
        """Why the request may not wait, with the time to come back; None if it may."""
        config, promises = self._config, self._promises
        is_free = config.max_queue_s is None and not len(promises)
        if is_free and self._too_many(request, waiting, 0) is None:
            return None
        promises.forget_missed(now)
        whose = fingerprint(request)
        outlook = Outlook(waiting, groups, self.stay_time.mean_s, config.max_num_batched_tokens)
        is_expected = promises.is_expected(whose, now)
        held = 0 if is_expected else self._num_held(outlook, now)
        why = self._too_many(request, waiting, held)
        if why is None:
            one_prompt_s = len(request.prompt) * outlook.token_s
            why = self._too_long(outlook, held, grace_s=one_prompt_s if is_expected else 0.0)
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

    def _num_held(self, outlook: Outlook, now: float) -> int:
        """Places to keep free for those who come back before enough others are free.

        Looks ahead as far as a request that started now may still have its own.
        """
        due_s = self._promises.next_due_s(now, _MAX_HELD)
        due_s = due_s[due_s <= _LONG_STAY * outlook.stay_s]
        if not len(due_s):
            return 0
        come = np.arange(1, len(due_s) + 1) * self._promises.share_kept
        return max(0, round(float((come - outlook.num_freed(due_s)).max()) + _SPARE))

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

    def _too_long(self, outlook: Outlook, held: int, grace_s: float) -> str | None:
        """Who comes back as told may have to let one more prompt pass (`grace_s`)."""
        most = self._config.max_queue_s
        if most is None:
            return None
        wait_s = outlook.wait_s(held)
        if wait_s <= most + grace_s:
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
        outlook: Outlook,
        now: float,
    ) -> float:
        config = self._config
        surplus = len(waiting) + 1 - config.max_waiting_requests
        tokens = waiting.num_tokens + len(request.prompt) - config.max_waiting_tokens
        soonest_s = max(surplus / outlook.rate, tokens * outlook.token_s, 0.0)
        room = float(config.max_waiting_requests)
        if config.max_queue_s is not None:
            soonest_s = max(soonest_s, outlook.wait_s(0) - config.max_queue_s)
            one_s = max(1.0 / outlook.rate, len(request.prompt) * outlook.token_s)
            room = min(room, config.max_queue_s / one_s)
        rate = outlook.rate * _BOOKED_SHARE
        return self._promises.make(
            whose, now, soonest_s=soonest_s, rate=rate, burst=room * _BURST_SHARE
        )
