"""What goes wrong between the ranks of one worker group."""

from collections.abc import Sequence


class MeetingFailed(RuntimeError):
    """The ranks of a group did not find each other at start, or do not fit together."""


class NativeLibraryMissing(RuntimeError):
    """A native library was not built, or was built from other sources; says how to build it."""


class ColumnsMismatch(ValueError):
    """A rank's columns are not as wide as all ranks agreed; nothing was sent."""

    def __init__(self, rank: int, size: int, widths: Sequence[int], shape: Sequence[int]) -> None:
        super().__init__(
            f"rank {rank} of {size} gathers columns of widths {list(widths)}, one for each rank, "
            f"but brings a tensor of shape {list(shape)}"
        )


class CollectiveFailed(RuntimeError):
    """A collective cannot be completed, and none after it: the group must be restarted as one.

    Attributes:
        rank: the rank that raises.
        peer: the rank that is to blame, as far as is known.
        step: the step this rank was in.
        collective: number of the collective on this rank since the group began, from 1.
    """

    def __init__(
        self, why: str, *, rank: int, peer: int | None, step: int, collective: int
    ) -> None:
        super().__init__(f"rank {rank}, step {step}, collective {collective}: {why}")
        self.rank, self.peer, self.step, self.collective = rank, peer, step, collective


class CollectiveTimeout(CollectiveFailed):
    """A peer did not come to a collective within the time limit."""


class PeerLost(CollectiveFailed):
    """A peer ended, or left the group, while others still needed it."""


class OutOfStep(CollectiveFailed):
    """Two ranks are in different collectives: they no longer compute the same step."""


def first_line(error: BaseException) -> str:
    """What torch's errors say before they go on with a C++ stack trace."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(". ")
