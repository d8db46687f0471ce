"""A keeper of weights inside one process, for tests without a cluster."""

import os

from worker.kept_weights import is_sealed


class OneKeeper:
    """`worker.kept_weights.WeightKeeper` that nobody waits at."""

    def __init__(self) -> None:
        self.fds: dict[tuple[str, str], int] = {}
        self.lent: list[str] = []
        self.is_closed = False
        self._asked = ("", "")

    def borrow(self, part: str, form: str) -> int | None:
        self._asked = (part, form)
        fd = self.fds.get(self._asked)
        return None if fd is None else os.dup(fd)

    def lend(self, fd: int) -> bool:
        assert is_sealed(fd)
        self.fds[self._asked] = os.dup(fd)
        self.lent.append(self._asked[0])
        return True

    def close(self) -> None:
        self.is_closed = True

    def forget(self) -> None:
        while self.fds:
            os.close(self.fds.popitem()[1])
