"""Where the time went from the end of one engine process until requests were taken again."""


class EngineRecovery:
    """Times are of one monotonic clock. Phases follow one another."""

    def __init__(self, how: str, restarts: int, ended: float, begins: float) -> None:
        """
        Args:
            how: the last one ended.
            restarts: of the cluster's engine, this one included.
            ended: when that was noticed.
            begins: when the next process does.
        """
        self._how, self._restarts = how, restarts
        self._ended, self._begins = ended, begins
        self._listens = begins

    def listens(self, now: float) -> None:
        """Its sockets are bound."""
        self._listens = now

    def serves(self, now: float) -> dict[str, object]:
        """A worker group takes plans: fields of the log's line."""
        return {
            "reason": self._how,
            "restarts": self._restarts,
            "paused_s": self._begins - self._ended,
            "started_s": self._listens - self._begins,
            "taken_over_s": now - self._listens,
            "seconds": now - self._ended,
        }
