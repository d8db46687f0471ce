"""Whose turn it is, of requests that were there whenever engine cores ended. Pure.

Their front ends ask for a turn instead of submitting them all at once (`cluster.frontend.session`):
if this engine ends too, the one whose turn it is will be the cause. Its turn is over when it has
got a token or has ended.
"""

from collections import deque
from collections.abc import Container

Turn = tuple[int, int]
"""Client and handle"""


class Turns:
    """One after the other, in the order of asking."""

    def __init__(self) -> None:
        self._waiting: deque[Turn] = deque()
        self._now: Turn | None = None

    def ask(self, client: int, handle: int) -> None:
        self._waiting.append((client, handle))

    @property
    def has_begun(self) -> bool:
        """Whether it is somebody's turn."""
        return self._now is not None

    def begin(self) -> Turn | None:
        """The next one, whose turn begins; None: nobody waits, or somebody has it."""
        if self._now is not None or not self._waiting:
            return None
        self._now = self._waiting.popleft()
        return self._now

    def over(self, client: int, handles: Container[int]) -> None:
        """These requests have got a token, have ended, or are not wanted any more."""
        if self._now is not None and self._now[0] == client and self._now[1] in handles:
            self._now = None

    def left(self, client: int) -> None:
        """A client is gone, and its requests with it."""
        self._waiting = deque(turn for turn in self._waiting if turn[0] != client)
        if self._now is not None and self._now[0] == client:
            self._now = None
