"""How often something that ended unasked is begun again, and after which pauses. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """The first restart comes at once; the pauses before the others grow."""

    max_restarts: int
    """In a row, without `stable_s` of service between them"""
    second_pause_s: float = 0.25
    """Before the second one; each further pause is twice as long."""
    longest_pause_s: float = 10.0
    stable_s: float = 60.0
    """Service that makes earlier ends forgotten"""


class Restarts:
    """Of one thing, of which there is one at a time."""

    def __init__(self, limits: RestartLimits) -> None:
        self._limits = limits
        self._began = 0.0
        self._num_in_a_row = 0

    def began(self, now: float) -> None:
        self._began = now

    def pause_s(self, now: float) -> float | None:
        """It has ended: the pause until it begins again; None: it has ended too often."""
        limits = self._limits
        if now - self._began >= limits.stable_s:
            self._num_in_a_row = 0
        if self._num_in_a_row >= limits.max_restarts:
            return None
        self._num_in_a_row += 1
        if self._num_in_a_row == 1:
            return 0.0
        growth: int = 2 ** min(self._num_in_a_row - 2, 30)
        return min(limits.second_pause_s * growth, limits.longest_pause_s)
