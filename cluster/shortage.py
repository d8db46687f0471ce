"""How long no group takes plans, and for how long those who wait may hope for one."""


class Shortage:
    """Begins when the last group is lost that takes plans, and ends when one does again."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self.why = ""
        """The last loss; empty: there is no shortage."""
        self._over_at: float | None = None

    def begins(self, why: str, now: float) -> None:
        """No group is left, or the next one was lost before it served."""
        if not self.why:
            self._over_at = now + self._patience_s
        self.why = why

    def ends(self) -> None:
        """A group serves."""
        self.why, self._over_at = "", None

    @property
    def next_deadline(self) -> float | None:
        """When patience is over; None: there is no shortage, or it is over already."""
        return self._over_at

    def runs_out(self, now: float) -> bool:
        """Whether patience is over now; said once."""
        if self._over_at is None or now < self._over_at:
            return False
        self._over_at = None
        return True
