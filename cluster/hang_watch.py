"""Whether a process that is asked now and then still answers. Pure: time is an argument."""

from typing import Literal

LOOKS = 4
"""Unanswered ones in a row that make a hang. More: a finer limit, more questions."""


class HangWatch:
    """Counts looks instead of seconds: when this process itself was stopped for a while (a
    snapshot, a suspended machine), the other one is not to blame."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: silence that counts as a hang, and at most a look more; 0: none does."""
        self._every_s = limit_s / LOOKS
        self._num_unanswered = 0
        self.next_look: float | None = None

    def begin(self, now: float) -> None:
        """The process is there, and can be asked."""
        self._num_unanswered = 0
        self.next_look = now + self._every_s if self._every_s else None

    def end(self) -> None:
        """It is not any more."""
        self.next_look = None

    def answered(self) -> None:
        self._num_unanswered = 0

    def look(self, now: float) -> Literal["ask", "hangs"] | None:
        """What to do now, if anything."""
        if self.next_look is None or now < self.next_look:
            return None
        if self._num_unanswered == LOOKS:
            self.next_look = None
            return "hangs"
        self.next_look = now + self._every_s
        self._num_unanswered += 1
        return "ask"
