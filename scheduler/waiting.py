"""The queue of sequences that hold no blocks, first to start first."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler.sequences import Sequence


class WaitingQueue:
    """Sequences in the order of their sort keys; preempted ones find their old place."""

    def __init__(self) -> None:
        self._queue: list[Sequence] = []
        self.num_tokens = 0
        """Tokens that must be computed or found in a cache before all could go on."""

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        """First to start first; a copy, so that the queue may change meanwhile."""
        return iter(self._queue[:])

    def first(self, count: int) -> list[Sequence]:
        return self._queue[:count]

    def add(self, sequence: Sequence) -> None:
        insort(self._queue, sequence, key=lambda item: item.sort_key)
        self.num_tokens += len(sequence.tokens)

    def remove(self, sequence: Sequence) -> None:
        at = 0
        if self._queue[0] is not sequence:
            at = bisect_left(self._queue, sequence.sort_key, key=lambda item: item.sort_key)
        assert self._queue[at] is sequence, f"sequence {sequence.serial} does not wait"
        del self._queue[at]
        self.num_tokens -= len(sequence.tokens)
