"""What can go wrong when counting blocks."""


class OutOfBlocks(Exception):
    """The pool cannot hold what was asked. The scheduler preempts, then retries."""

    def __init__(self, *, wanted: int, idle: int, total: int) -> None:
        super().__init__(f"wanted {wanted} KV blocks, but only {idle} of {total} are idle")
        self.wanted, self.idle, self.total = wanted, idle, total
