"""What the engine keeps of each group that takes plans: who gets them, and how long they take."""

from collections import deque

WINDOW_S = 10.0
"""Time over which the step rate is taken."""


class Lane:
    """One group in service, from `Serve` to `Lose`."""

    def __init__(self, epoch: int, peers: tuple[bytes, ...], answering: int = 0) -> None:
        """`answering` is the rank that answers: the first one of the last stage."""
        self.epoch = epoch
        self.peers = peers
        """In the order of ranks."""
        self.answering = answering
        self.num_unanswered = 0
        self.num_steps = 0
        """Answered in this epoch."""
        self._busy_since: float | None = None
        self._recent: deque[tuple[float, int]] = deque()

    @property
    def step(self) -> int:
        """The oldest step that is not answered; 0: there is none."""
        return self.num_steps + 1 if self.num_unanswered else 0

    def sent(self, now: float) -> None:
        """A plan went out."""
        self.num_unanswered += 1
        if self._busy_since is None:
            self._busy_since = now

    def answered(self, now: float) -> float:
        """The oldest plan was answered; the next one has the time of a whole step from now.

        Returns the seconds since it could begin: it was sent, and the one before was answered.
        """
        took_s = now - (now if self._busy_since is None else self._busy_since)
        self.num_unanswered -= 1
        self.num_steps += 1
        self._busy_since = now if self.num_unanswered else None
        if not self._recent or now - self._recent[-1][0] >= WINDOW_S / 10:
            self._recent.append((now, self.num_steps - 1))
        while now - self._recent[0][0] > WINDOW_S:
            self._recent.popleft()
        return took_s

    def deadline(self, step_timeout_s: float) -> float | None:
        """When the oldest plan must be answered; None: there is none."""
        return None if self._busy_since is None else self._busy_since + step_timeout_s

    def silent_s(self, now: float) -> float:
        """Since it was last known to live: it answered, or was given the plan that it owes."""
        return 0.0 if self._busy_since is None else now - self._busy_since

    def steps_per_s(self, now: float) -> float:
        """Over the last seconds; 0 when idle for as long."""
        while self._recent and now - self._recent[0][0] > WINDOW_S:
            self._recent.popleft()
        if not self._recent:
            return 0.0
        since, count = self._recent[0]
        return (self.num_steps - count) / max(now - since, WINDOW_S / 10)
