"""How each loss of a worker group was got over: its phases and their times, for log and metrics.

A recovery begins when the loss is noticed. It is over when what the group was computing goes on,
here or in another group, and the group serves again or never will.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.group_instructions import (
    Instruction,
    LetLoad,
    Lose,
    Refuse,
    Retire,
    Serve,
    SizePool,
    Start,
)
from cluster.loss_reasons import REASONS
from scheduler.meter import LATENCY_S, Histogram
from scheduler.scheduler import Scheduler
from scheduler.sequences import Sequence as Moved

PHASES = (
    "noticed",
    "fenced",
    "paused",
    "respawned",
    "weights",
    "allocated",
    "ready",
    "first_token",
)
"""`noticed`: since the group last gave a sign of life; then one after the other `fenced`: until no
process of it was left, `paused`: until it was started again, `respawned`: until all its ranks had
come, `weights`: until they had loaded, `allocated`: until it served. From the loss on, `ready`:
until it served, `first_token`: until one of its streams went on, wherever."""


@dataclass(slots=True)
class Recovery:
    """One loss that is being got over."""

    group: int
    epoch: int
    reason: str
    rank: int
    message: str
    lost_at: float
    seconds: dict[str, float]
    """By phase, as far as they are over."""
    moved: list[tuple[Moved, int]] = field(default_factory=list)
    """What it was computing, with the tokens that were known; empty once one went on."""
    num_moved: int = 0
    num_starts: int = 0
    outcome: str = ""
    """What became of the group: restarted, or stopped; empty: that is open."""
    phase_since: float = 0.0

    def phase_ended(self, phase: str, now: float) -> None:
        self.seconds[phase] = now - self.phase_since
        self.phase_since = now

    def fields(self) -> dict[str, object]:
        """Of its line in the log."""
        return {
            "group": self.group,
            "epoch": self.epoch,
            "reason": self.reason,
            "rank": self.rank,
            "outcome": self.outcome,
            "num_moved": self.num_moved,
            "num_starts": self.num_starts,
            **{f"{phase}_s": self.seconds[phase] for phase in PHASES if phase in self.seconds},
            "error": self.message,
        }

    @property
    def is_over(self) -> bool:
        return bool(self.outcome) and not self.moved


class Recoveries:
    """Those that are going on, by group, and the times of those that are over."""

    def __init__(self) -> None:
        self._open: dict[int, Recovery] = {}
        self.seconds = {phase: Histogram(LATENCY_S) for phase in PHASES}
        self.num_restarts: dict[str, int] = dict.fromkeys(REASONS, 0)

    def __len__(self) -> int:
        return len(self._open)

    def lost(self, lost: Lose, moved: Sequence[Moved], noticed_s: float, now: float) -> None:
        """A group was lost. In a start that fails, the same recovery goes on."""
        recovery = self._open.get(lost.group)
        if recovery is None:
            recovery = self._open[lost.group] = Recovery(
                group=lost.group,
                epoch=lost.epoch,
                reason=lost.reason,
                rank=lost.rank,
                message=lost.message,
                lost_at=now,
                seconds={"noticed": noticed_s},
                moved=[(sequence, len(sequence.tokens)) for sequence in moved],
                num_moved=len(moved),
            )
        recovery.phase_since = now
        if not lost.restarts:
            recovery.outcome = "stopped"

    def fenced(self, group: int, now: float) -> None:
        """No process of it is left."""
        recovery = self._open.get(group)
        if recovery is not None and not recovery.outcome:
            recovery.phase_ended("fenced", now)

    def follow(self, instruction: Instruction, now: float) -> None:
        """A group's state machine asks for this."""
        recovery = None if isinstance(instruction, Refuse) else self._open.get(instruction.group)
        if recovery is None:
            return
        match instruction:
            case Start():
                recovery.num_starts += 1
                recovery.phase_ended("paused", now)
                self.num_restarts[recovery.reason] += 1
            case LetLoad():
                recovery.phase_ended("respawned", now)
            case SizePool():
                recovery.phase_ended("weights", now)
            case Serve():
                recovery.phase_ended("allocated", now)
                recovery.seconds["ready"] = now - recovery.lost_at
                recovery.outcome = "restarted"
            case Retire():
                recovery.outcome = recovery.outcome or "retired"

    def look(self, scheduler: Scheduler | None, now: float) -> list[Recovery]:
        """See what went on; returns the recoveries that are over."""
        over = []
        for recovery in list(self._open.values()):
            if scheduler is not None and recovery.moved:
                _look_at_moved(recovery, scheduler, now)
            if recovery.is_over:
                over.append(self._open.pop(recovery.group))
                for phase, seconds in recovery.seconds.items():
                    self.seconds[phase].add(seconds)
        return over


def _look_at_moved(recovery: Recovery, scheduler: Scheduler, now: float) -> None:
    left = []
    for sequence, length in recovery.moved:
        if scheduler.length(sequence) > length:
            recovery.seconds["first_token"] = now - recovery.lost_at
            recovery.moved = []
            return
        if scheduler.is_live(sequence):
            left.append((sequence, length))
    recovery.moved = left
