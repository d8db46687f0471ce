"""Whether an output was there when engine cores ended. Pure state of one output."""

from dataclasses import dataclass


@dataclass(slots=True)
class Presence:
    """At which ends of engines it was there, with no token in between."""

    num_crashes: int = 0
    _known: int | None = None
    """Engines that had ended when it was submitted to the present one; None: it was not."""
    _has_turn: bool = False

    def submitted(self, num_crashes: int, *, has_turn: bool = False) -> None:
        """An engine has it, before which so many had ended; if it `has_turn`, and of all suspects
        none but this one."""
        self._known, self._has_turn = num_crashes, has_turn

    def withdrawn(self) -> None:
        """The engine does not have it, or not yet."""
        self._known, self._has_turn = None, False

    def went_on(self) -> None:
        """It has a token from the engine, which did not end of it."""
        self.num_crashes, self._has_turn = 0, False

    def meets(self, num_crashes: int) -> bool:
        """An engine is there before which so many had ended: another one, or the same again.

        Returns whether this output is the cause of the last one's end.
        """
        was_there = self._known is not None and num_crashes > self._known
        is_cause = was_there and self._has_turn
        self.num_crashes += was_there
        self.withdrawn()
        return is_cause
