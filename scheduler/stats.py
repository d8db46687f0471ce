"""Counters and gauges of the scheduler; `cluster` turns them into status and metrics."""

from dataclasses import dataclass, field

from msgspec import Struct


@dataclass(slots=True)
class Counters:
    """Totals since the scheduler was made; they only rise."""

    steps: int = 0
    mixed_steps: int = 0
    """Steps that held decodes and prompt tokens."""
    prefill_steps: int = 0
    """Steps that held prompt tokens alone."""
    decode_tokens: int = 0
    prefill_tokens: int = 0
    """Prompt tokens computed, recomputation after preemption included."""
    recomputed_tokens: int = 0
    queried_tokens: int = 0
    """Prompt tokens that were looked for in the prefix cache."""
    cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache."""
    output_tokens: int = 0
    preemptions: int = 0
    accepted: int = 0
    continued: int = 0
    """Of the accepted: those that were answered in part, or waited, before they came here."""
    finished: dict[str, int] = field(default_factory=dict)
    """By reason: stop, length, abort, timeout, error."""
    refused: dict[str, int] = field(default_factory=dict)
    """By reason, as in `Rejection`."""
    stale_results: int = 0
    """Results of an older epoch, dropped."""
    dropped_tokens: int = 0
    """Tokens sampled for sequences that had ended meanwhile."""
    poisoned: int = 0
    """Requests given up because worker groups failed whenever they were computed."""

    def finish(self, reason: str) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def refuse(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1


class GroupStats(Struct, frozen=True, kw_only=True):
    """One worker group now."""

    group: int
    epoch: int
    step: int
    unanswered: int
    running: int
    num_blocks: int
    idle_blocks: int
    cached_blocks: int
    """Blocks whose content a prefix could reuse, held or idle."""
    peak_blocks: int
    """Most blocks ever held at once."""


class SchedulerStats(Struct, frozen=True, kw_only=True):
    """The scheduler now, and its totals."""

    waiting: int
    waiting_tokens: int
    promised: int
    """Refused requests that were told when to come back, and have not yet."""
    running: int
    steps: int
    mixed_steps: int
    prefill_steps: int
    decode_tokens: int
    prefill_tokens: int
    recomputed_tokens: int
    queried_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    accepted: int
    continued: int
    finished: dict[str, int]
    refused: dict[str, int]
    stale_results: int
    dropped_tokens: int
    poisoned: int
    groups: tuple[GroupStats, ...]
