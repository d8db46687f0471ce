"""What the engine did, step by step, for clients that watch: recorded only while one does.

A row is begun when a plan goes out and complete when it is answered. Rows go to every watcher
together, at most one message per `NEWS_EVERY_S`; when nothing changes there is nothing to say.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from cluster.messages.reports import GroupLoad, StepNews
from scheduler.arrays import Int32Array
from scheduler.outbox import Outgoing
from scheduler.plan import StepPlan, StepResult
from scheduler.scheduler import Scheduler

NEWS_EVERY_S = 0.1
"""Least time between two messages to a watcher."""

MAX_ROWS = 4096
"""Rows kept for the next message; older ones are dropped."""


class _Planned(NamedTuple):
    """A step as it went out."""

    epoch: int
    step: int
    group: int
    prefill_tokens: int
    decode_tokens: int
    cached_tokens: int
    preempted: int
    running: int
    waiting: int
    used_blocks: int
    cached_blocks: int


class StepFeed:
    """The rows since the last message, and who gets them. Times are of the engine's clock."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._watchers: set[int] = set()
        self._planned: dict[int, deque[_Planned]] = {}
        """By group: steps that are not answered, oldest first."""
        self._rows: deque[tuple[_Planned, float, float, int]] = deque(maxlen=MAX_ROWS)
        """Each with the time of its answer, the seconds it took, and the tokens it brought."""
        self._first_token_s: list[float] = []
        self._said: tuple[int, tuple[GroupLoad, ...]] | None = None
        """What the last message said of now; None: somebody has not heard it."""
        self._next_at = 0.0
        self._preemptions: int | None = None
        """The scheduler's count when the last plan went out; None: nobody watched then."""

    @property
    def watchers(self) -> Iterable[int]:
        return tuple(self._watchers)

    def watch(self, client: int) -> None:
        """Record from now on, if nobody watched; the client is told how things are soon."""
        self._watchers.add(client)
        self._said = None

    def leave(self, client: int) -> None:
        """Tell the client no more; record no more if it was the last one."""
        self._watchers.discard(client)
        if not self._watchers:
            self._planned.clear()
            self._rows.clear()
            self._first_token_s.clear()
            self._preemptions = None

    def planned(self, group: int, plan: StepPlan, scheduler: Scheduler) -> None:
        """A plan goes out; the figures are those of this moment."""
        if not self._watchers:
            return
        now = scheduler.groups[group]
        num_tokens = int(plan.count.sum()) if len(plan.count) else len(plan.slot)
        before, self._preemptions = self._preemptions, scheduler.counters.preemptions
        self._planned.setdefault(group, deque()).append(
            _Planned(
                epoch=plan.epoch,
                step=plan.step,
                group=group,
                prefill_tokens=len(plan.token),
                decode_tokens=num_tokens - len(plan.token),
                cached_tokens=sum(admission.num_cached for admission in plan.admitted),
                preempted=0 if before is None else self._preemptions - before,
                running=now.num_running,
                waiting=scheduler.num_waiting,
                used_blocks=now.cache.num_blocks - now.cache.num_idle,
                cached_blocks=len(now.cache.index),
            )
        )

    def answered(
        self, group: int, result: StepResult, outcome: Iterable[Outgoing], now: float
    ) -> None:
        """The step that was answered is complete; steps of a lost epoch are forgotten."""
        if not self._watchers:
            return
        for outgoing in outcome:
            self._first_token_s += [
                started.queue_s + started.prefill_s for started in outgoing.batch.started
            ]
        waiting = self._planned.get(group)
        while waiting and waiting[0][:2] <= (result.epoch, result.step):
            row = waiting.popleft()
            if row[:2] == (result.epoch, result.step):
                self._rows.append((row, now, result.compute_s, len(result.token)))

    def next_news_at(self, scheduler: Scheduler | None) -> float | None:
        """When `news` has something to say; None: not before something happens."""
        if not self._watchers or scheduler is None:
            return None
        return self._next_at if self._rows or self._said != _load(scheduler) else None

    def news(self, scheduler: Scheduler | None, now: float) -> StepNews | None:
        """What the watchers should hear now, if it is time and there is anything."""
        due = self.next_news_at(scheduler)
        if due is None or now < due:
            return None
        assert scheduler is not None
        rows = list(self._rows)
        self._rows.clear()
        first_token_s, self._first_token_s = self._first_token_s, []
        self._next_at = now + NEWS_EVERY_S
        self._said = num_waiting, groups = _load(scheduler)
        shape = len(rows), len(_Planned._fields)
        columns = np.asarray([row for row, *_ in rows], dtype=np.int32).reshape(shape).T
        return StepNews(
            uptime_s=now - self._began,
            num_waiting=num_waiting,
            groups=groups,
            age_s=np.asarray([now - at for _, at, _, _ in rows], dtype=np.float32),
            compute_s=np.asarray([seconds for _, _, seconds, _ in rows], dtype=np.float32),
            new_tokens=np.asarray([count for *_, count in rows], dtype=np.int32),
            first_token_s=np.asarray(first_token_s, dtype=np.float32),
            **dict(zip(_Planned._fields[1:], map(_column, columns[1:]), strict=True)),
        )


def _column(values: Int32Array) -> Int32Array:
    return np.ascontiguousarray(values)


def _load(scheduler: Scheduler) -> tuple[int, tuple[GroupLoad, ...]]:
    """How things are: what waits, and each group."""
    return scheduler.num_waiting, tuple(
        GroupLoad(
            group=group.group_id,
            num_running=group.num_running,
            num_blocks=group.cache.num_blocks,
            num_used_blocks=group.cache.num_blocks - group.cache.num_idle,
            num_cached_blocks=len(group.cache.index),
        )
        for group in scheduler.groups.values()
    )
