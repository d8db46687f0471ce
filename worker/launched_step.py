"""A step on its way: what a rank has begun to compute, until it is answered."""

import time
from dataclasses import dataclass

import numpy as np

from scheduler.arrays import Int32Array
from scheduler.plan import FailedSlice, LogprobRows, StepPlan, StepResult
from worker import logprobs
from worker.batch import Expected, SlotTable
from worker.host_copy import HostCopy
from worker.sampler import check_logits


@dataclass(slots=True)
class StepParts:
    """What is answered beside tokens."""

    logprobs: list[LogprobRows]
    failed: dict[int, str]
    """Why sequences cannot go on, by slice"""
    unchecked: tuple[HostCopy, Int32Array] | None = None
    """Each row's largest logit, and its slot"""


class LaunchedStep:
    """A step that the device computes, or has computed. Finished in the order of their begin."""

    def __init__(
        self,
        plan: StepPlan,
        table: SlotTable,
        expected: Expected,
        tokens: HostCopy | None,
        parts: StepParts,
        *,
        answers: bool,
        began: float,
        forward_s: float,
    ) -> None:
        self._plan, self._table, self._expected = plan, table, expected
        self._tokens, self._parts = tokens, parts
        self._answers = answers
        self._began, self._forward_s = began, forward_s

    def is_done(self) -> bool:
        """Whether `finish` would not wait."""
        return self._tokens is None or self._tokens.is_here()

    def finish(self) -> StepResult | None:
        """Wait for the tokens and take them in; the rank that sampled them returns the result.

        Raises:
            BadLogits: no token can be sampled from what the model gave.
        """
        parts = self._parts
        sampled = np.empty(0, dtype=np.int64)
        if self._tokens is not None:
            sampled = self._tokens.read().numpy()
            self._table.record(self._expected, sampled)
        if parts.unchecked is not None:
            best, slots = parts.unchecked
            check_logits(best.read(), slots)
        if not self._answers:
            return None
        return StepResult(
            epoch=self._plan.epoch,
            step=self._plan.step,
            token=sampled.astype(np.int32),
            logprobs=logprobs.joined(parts.logprobs),
            failed=tuple(FailedSlice(row=row, message=m) for row, m in parts.failed.items()),
            compute_s=time.perf_counter() - self._began,
            forward_s=self._forward_s,
        )
