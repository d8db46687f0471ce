"""In which order and how many at a time a batch of requests is handed to an engine.

An engine takes only so many waiting requests. A batch may be larger: what the engine
refuses for a full queue is handed in again when there is room. No I/O and no clock here.
"""

from heapq import heappop, heappush

from cluster.frontend.errors import QueueFull

SHORTEST_WAIT_S = 0.05
LONGEST_WAIT_S = 5.0


class BatchQueue:
    """The requests of one batch, by their index: to be submitted, in flight, or done."""

    def __init__(self, count: int) -> None:
        self._todo = list(range(count))  # a heap: first come, first submitted
        self._in_flight: set[int] = set()
        self._count = count
        self._most = max(count, 1)  # in flight; falls when the engine is full, then creeps up
        self._answers_since_growth = 0
        self._not_before_s = 0.0

    @property
    def is_done(self) -> bool:
        return not self._todo and not self._in_flight

    def next_index(self, now_s: float) -> int | None:
        """The request to submit now; None while there is none, or no room."""
        if not self._todo or len(self._in_flight) >= self._most or now_s < self._not_before_s:
            return None
        index = heappop(self._todo)
        self._in_flight.add(index)
        return index

    def wait_s(self, now_s: float) -> float | None:
        """How long to wait for answers before asking again; None: until one comes."""
        if not self._todo or len(self._in_flight) >= self._most:
            return None
        return max(self._not_before_s - now_s, 0.0)

    def note_answer(self, index: int) -> None:
        """The request is answered, one way or the other."""
        self._in_flight.remove(index)
        self._answers_since_growth += 1
        if self._answers_since_growth >= self._most:
            self._most = min(self._most + 1, self._count)
            self._answers_since_growth = 0

    def note_full(self, index: int, refusal: QueueFull, now_s: float) -> None:
        """The engine had no room for it: it is next once one in flight is answered, or, when
        others fill the queue, once the engine's advice has passed."""
        self._in_flight.remove(index)
        heappush(self._todo, index)
        self._most = max(len(self._in_flight), 1)
        if not self._in_flight:
            advice_s = refusal.retry_after_s or SHORTEST_WAIT_S
            self._not_before_s = now_s + min(max(advice_s, SHORTEST_WAIT_S), LONGEST_WAIT_S)
