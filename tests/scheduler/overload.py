"""The real scheduler under load in virtual time: scripted steps, and clients that come back.

Nothing here sleeps and nothing is random but by seed: a minute takes a second or two.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from scheduler.arrays import int32
from scheduler.config import ModelLimits, SchedulerConfig
from scheduler.journal import Record
from scheduler.plan import StepPlan, StepResult
from scheduler.request import Request
from scheduler.sampling import SamplingParams
from scheduler.scheduler import Scheduler

VOCAB = 1000
CLIENT = 1


def step_s(num_tokens: int) -> float:
    """A step's seconds: a fixed part, and a part per token."""
    return 0.050 + 0.0025 * num_tokens


@dataclass
class Call:
    """One client's request, and what became of it."""

    prompt: list[int]
    num_output: int
    came: float
    tries: list[float] = field(default_factory=list)
    accepted_at: float | None = None
    num_tokens: int = 0
    first_token_s: float | None = None
    """From the try that was accepted."""
    ended_at: float | None = None

    @property
    def num_refusals(self) -> int:
        return len(self.tries) - (self.accepted_at is not None)


class Simulation:
    """One group that computes steps one after the other, two plans in flight."""

    def __init__(
        self,
        *,
        returns: float = 1.0,
        says_length: bool = True,
        began: float = 0.0,
        seed: int = 0,
        **config: object,
    ) -> None:
        """
        Args:
            returns: share of refused calls that come back.
            says_length: a call ends at its `max_tokens`; else its client aborts it there, so
                that the scheduler cannot know how long it takes.
            began: what the clock says at the beginning; `at` of calls counts from there on too.
        """
        settings: dict[str, object] = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 256,
            "enable_prefix_caching": False,
        }
        self.records: list[Record] = []
        self.told_s: list[int] = []
        """What `Retry-After` would have said, of all refusals."""
        self.scheduler = Scheduler(
            SchedulerConfig(**(settings | config)),  # type: ignore[arg-type]
            ModelLimits(vocab_size=VOCAB, max_model_len=4096),
            self.records.append,
        )
        self.scheduler.add_group(0, 1, 10_000, began)
        self.now = began
        self.calls: list[Call] = []
        self.most_waiting = 0
        self._rng = np.random.default_rng(seed)
        self._returns, self._says_length = returns, says_length
        self._arrivals: list[tuple[float, int, Call]] = []
        self._in_flight: deque[StepPlan] = deque()
        self._done_at: float | None = None
        """When the oldest plan in flight is answered."""
        self._live: dict[int, Call] = {}
        self._number = itertools.count(1)

    def arrive(self, at: float, num_prompt: int, num_output: int) -> Call:
        prompt = self._rng.integers(1, VOCAB, num_prompt).tolist()
        call = Call(prompt=prompt, num_output=num_output, came=at)
        self.calls.append(call)
        self._push(at, call)
        return call

    def arrive_again(self, at: float, call: Call) -> None:
        """The call is tried once more, whatever it was told."""
        self._push(at, call)

    def arrive_at_random(
        self,
        rate: float,
        begin: float,
        end: float,
        num_prompt: int,
        lengths: Callable[[np.random.Generator], int],
    ) -> list[Call]:
        """A Poisson stream of calls."""
        return [
            self.arrive(at, num_prompt, lengths(self._rng))
            for at in self._poisson(rate, begin, end)
        ]

    def _poisson(self, rate: float, begin: float, end: float) -> Iterator[float]:
        at = begin + self._rng.exponential(1.0 / rate)
        while at < end:
            yield at
            at += self._rng.exponential(1.0 / rate)

    def _push(self, at: float, call: Call) -> None:
        heapq.heappush(self._arrivals, (at, next(self._number), call))

    def run(self, until: float = math.inf) -> None:
        """Until then, or until all is answered."""
        while self._arrivals or self._in_flight:
            next_call = self._arrivals[0][0] if self._arrivals else math.inf
            if min(next_call, self._done_at or math.inf) > until:
                return
            if self._done_at is not None and self._done_at <= next_call:
                self.now = self._done_at
                self._answer()
            else:
                self.now, _, call = heapq.heappop(self._arrivals)
                self._submit(call)
            while (plan := self.scheduler.plan(0, self.now)) is not None:
                self._in_flight.append(plan)
                if self._done_at is None:
                    self._done_at = self.now + step_s(_num_tokens(plan))

    def _submit(self, call: Call) -> None:
        call.tries.append(self.now)
        handle = next(self._number)
        request = Request(
            handle=handle,
            prompt=int32(call.prompt),
            sampling=SamplingParams(
                temperature=0.0,
                max_tokens=call.num_output if self._says_length else 3000,
                ignore_eos=True,
            ),
        )
        rejection = self.scheduler.submit(request, CLIENT, self.now)
        if rejection is None:
            call.accepted_at = self.now
            self._live[handle] = call
        else:
            assert rejection.reason == "queue_full"
            assert rejection.retry_after_s is not None
            assert rejection.retry_after_s >= 1
            self.told_s.append(math.ceil(rejection.retry_after_s))
            if self._rng.random() < self._returns:
                latency_s = self._rng.exponential(0.005)
                self._push(self.now + self.told_s[-1] + latency_s, call)
        self.most_waiting = max(self.most_waiting, self.scheduler.num_waiting)

    def _answer(self) -> None:
        plan = self._in_flight.popleft()
        sampled = int(plan.samples.sum()) if len(plan.samples) else len(plan.slot)
        result = StepResult(
            epoch=1,
            step=plan.step,
            token=int32(np.full(sampled, 7)),
            compute_s=step_s(_num_tokens(plan)),
        )
        for outgoing in self.scheduler.apply(0, result, self.now):
            for started in outgoing.batch.started:
                call = self._live[started.handle]
                assert call.accepted_at is not None
                call.first_token_s = self.now - call.accepted_at
            for handle in outgoing.batch.handle.tolist():
                self._live[handle].num_tokens += 1
            for ended in outgoing.batch.ended:
                self._live.pop(ended.handle).ended_at = self.now
        self._abort_long_ones()
        self._done_at = None
        if self._in_flight:
            self._done_at = self.now + step_s(_num_tokens(self._in_flight[0]))

    def _abort_long_ones(self) -> None:
        done = [handle for handle, call in self._live.items() if call.num_tokens >= call.num_output]
        if done:
            self.scheduler.abort(CLIENT, done, self.now)
        for handle in done:
            self._live.pop(handle).ended_at = self.now


def _num_tokens(plan: StepPlan) -> int:
    return int(plan.count.sum()) if len(plan.count) else len(plan.slot)
