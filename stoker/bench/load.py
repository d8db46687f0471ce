"""Sends a load: requests at the times they are due, or as many at once as are wanted.

Open loop: requests go out when they arrive, whatever the server does; with a limit on those under
way they queue here, and the wait counts. Closed loop: each place sends its next request when its
last one has ended.
"""

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from stoker.bench.record import Outcome, Record, record_of
from stoker.bench.stream import Clock, Listener, Reply


class Post(Protocol):
    """Sends one body and feeds the answer; `HttpClient.post` bound to a route, or a script."""

    async def __call__(self, body: bytes, listener: Listener) -> None: ...


class Watcher(Protocol):
    """Told of each request that has ended."""

    def __call__(self, record: Record) -> None: ...


@dataclass(frozen=True, slots=True)
class Sending:
    """One request, ready to go out."""

    body: bytes
    max_tokens: int | None
    """Tokens that it asks for; None: it does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """When requests go out."""

    arrivals: Iterable[float] | None
    """Seconds after the start, one for each request; None: closed loop."""
    max_concurrency: int | None
    """Most requests under way; None: no limit, which a closed loop needs."""
    duration_s: float | None = None
    """After this long no more are sent; None: all are."""
    timeout_s: float = 600.0
    """A request whose answer is not whole by then has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A load that is over."""

    records: list[Record]
    began_s: float
    ended_s: float
    """When the last answer had ended."""


class Load:
    """One load on one server."""

    def __init__(self, post: Post, pace: Pace, clock: Clock, on_end: Watcher | None = None) -> None:
        if pace.arrivals is None and pace.max_concurrency is None:
            raise ValueError("a closed loop needs a number of requests to keep under way")
        self._post = post
        self._pace = pace
        self._clock = clock
        self._on_end = on_end
        self._records: list[Record] = []
        self._began_s = 0.0

    async def run(self, sendings: Iterable[Sending]) -> Run:
        """Send them all, or those that the duration allows, and wait for every answer."""
        self._began_s = self._clock()
        async with asyncio.TaskGroup() as tasks:
            if self._pace.arrivals is None:
                assert self._pace.max_concurrency is not None
                rest = iter(sendings)
                for _ in range(self._pace.max_concurrency):
                    tasks.create_task(self._keep_sending(rest))
            else:
                await self._send_arrivals(sendings, self._pace.arrivals, tasks)
        return Run(records=self._records, began_s=self._began_s, ended_s=self._clock())

    async def _keep_sending(self, rest: Iterator[Sending]) -> None:
        for sending in rest:
            due_s = self._clock()
            if self._is_over(due_s):
                return
            await self._send(sending, due_s, due_s)

    async def _send_arrivals(
        self, sendings: Iterable[Sending], arrivals: Iterable[float], tasks: asyncio.TaskGroup
    ) -> None:
        limit = self._pace.max_concurrency
        places = None if limit is None else asyncio.Semaphore(limit)
        for sending, arrival_s in zip(sendings, arrivals, strict=False):
            due_s = self._began_s + arrival_s
            if self._is_over(due_s):
                return
            if (wait_s := due_s - self._clock()) > 0:
                await asyncio.sleep(wait_s)
            tasks.create_task(self._arrive(sending, due_s, places))

    async def _arrive(
        self, sending: Sending, due_s: float, places: asyncio.Semaphore | None
    ) -> None:
        if places is None:
            await self._send(sending, due_s, due_s)
            return
        had_to_wait = places.locked()
        async with places:
            await self._send(sending, due_s, self._clock() if had_to_wait else due_s)

    async def _send(self, sending: Sending, due_s: float, free_s: float) -> None:
        sent_s = self._clock()
        reply = Reply()
        trouble = None
        try:
            async with asyncio.timeout(self._pace.timeout_s):
                await self._post(sending.body, reply)
        except TimeoutError:
            trouble = "timeout"
        except OSError as error:
            trouble = type(error).__name__
        record = record_of(
            reply,
            due_s=due_s,
            free_s=free_s,
            sent_s=sent_s,
            now=self._clock(),
            max_tokens=sending.max_tokens,
            trouble=trouble,
        )
        self._records.append(record)
        if self._on_end is not None:
            self._on_end(record)

    def _is_over(self, due_s: float) -> bool:
        duration_s = self._pace.duration_s
        return duration_s is not None and due_s - self._began_s >= duration_s


def most_under_way(records: Iterable[Record]) -> int:
    """How many requests were at the server at once, at the most."""
    changes = [change for record in records for change in ((record.sent_s, 1), (record.end_s, -1))]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def is_ok(record: Record) -> bool:
    return record.outcome is Outcome.OK
