"""What the state machine of a worker group (`cluster.groups`) asks for when something happens."""

from dataclasses import dataclass
from typing import TypeAlias

from cluster.loss_reasons import BY_REQUESTS, LossReason


@dataclass(frozen=True, slots=True)
class LetLoad:
    """Tell these peers that they may load their weights."""

    group: int
    peers: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class SizePool:
    """Send these peers the number of blocks that each rank can hold."""

    group: int
    peers: tuple[bytes, ...]
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Serve:
    """The group takes plans now."""

    group: int
    epoch: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lose:
    """The group is gone: take its sequences back, and end what is left of its processes."""

    group: int
    epoch: int
    message: str
    rank: int
    """Whose fault it was; -1: the group's."""
    step: int
    was_ready: bool
    restarts: bool
    reason: LossReason = "died"
    retires: bool = False
    """It was about to leave anyway."""
    was_hit: bool = False
    """A fault was ordered for it."""


def why_lost(lost: Lose) -> str:
    """In words: who failed, when, and why."""
    who = f"rank {lost.rank} of group {lost.group}" if lost.rank >= 0 else f"group {lost.group}"
    when = f" at step {lost.step}" if lost.step else ""
    return f"{who} failed{when}: {lost.message}"


def held_against(lost: Lose) -> str:
    """The same, if the requests that it was computing may be the cause; else nothing."""
    return why_lost(lost) if lost.reason in BY_REQUESTS and not lost.was_hit else ""


@dataclass(frozen=True, slots=True)
class Start:
    """Start the ranks of this epoch."""

    group: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Start nothing new in the group; or, not `drains`, let it take part again."""

    group: int
    drains: bool = True


@dataclass(frozen=True, slots=True)
class Retire:
    """Take back what still runs in the group, and end its processes in order."""

    group: int
    epoch: int
    comes_back: bool = False
    """A start follows as soon as they have ended."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Send this peer away; it is not, or no longer, one of the group's."""

    peer: bytes
    message: str


Instruction: TypeAlias = LetLoad | SizePool | Serve | Lose | Start | Drain | Retire | Refuse
