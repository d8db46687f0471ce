"""Finding stop strings in text that comes piece by piece.

All stop strings are searched at once with one automaton (Aho and Corasick 1975), so the
work per character does not depend on how many there are, how long they are, or where the
pieces end.

Which one stops: the one that is complete first, reading character by character. If several
are complete at the same character, the longest, so that the text is cut earliest. Hence the
result is the same for every way of cutting the text into pieces.
"""

from collections import deque
from collections.abc import Sequence

from scheduler.errors import InvalidRequest

MAX_STOP_CHARS = 16_384
"""Of all stop strings of a request together. More: memory and time at the request's start."""


class StopStrings:
    """Lets text through until a stop string is complete.

    Text that could still be the beginning of a stop string is held back.

    Raises:
        InvalidRequest: an empty stop string, or more than `MAX_STOP_CHARS` characters.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        self._automaton = _Automaton(stops) if stops else None
        self.any = bool(stops)
        """Whether there is anything to find."""
        self._include = include_in_output
        self._state = 0
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; nothing may be fed after that."""

    def feed(self, text: str, *, may_stop: bool = True) -> str:
        """The part of the text so far that is certain to belong to the output.

        With `may_stop` false, stop strings that this text completes are text like any other;
        one that is complete only later still counts.
        """
        assert self.matched is None, f"fed after the stop string {self.matched!r}"
        automaton = self._automaton
        if automaton is None:
            return text
        buffer = self._held + text
        state, stop_at = self._state, automaton.stop_at
        for end, letter in enumerate(text, start=len(self._held) + 1):
            state = automaton.after(state, letter)
            stop = stop_at[state]
            if stop is not None and may_stop:
                self.matched, self._held = stop, ""
                return buffer[:end] if self._include else buffer[: end - len(stop)]
        self._state = state
        num_out = len(buffer) - automaton.num_held[state]
        self._held = buffer[num_out:]
        return buffer[:num_out]

    def flush(self) -> str:
        """What was held back, once it is known that no more text comes."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """States are prefixes of stop strings; state 0 is the empty one."""

    def __init__(self, stops: Sequence[str]) -> None:
        num_chars = sum(map(len, stops))
        if not all(stops):
            raise InvalidRequest("stop must be made of non-empty texts, got ''", param="stop")
        if num_chars > MAX_STOP_CHARS:
            raise InvalidRequest(
                f"stop has {num_chars} characters altogether, at most {MAX_STOP_CHARS} may be",
                param="stop",
            )
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [0]  # the longest proper suffix of a state that is a state too
        self.stop_at: list[str | None] = [None]
        """The longest stop string that ends in a state."""
        self.num_held = [0]
        """How many of the last characters may begin a stop string that is not complete."""
        self._depth = [0]
        for stop in stops:
            self._add(stop)
        self._link()

    def after(self, state: int, letter: str) -> int:
        """The state that follows; amortized constant time."""
        steps = self._next
        while letter not in steps[state]:
            if state == 0:
                return 0
            state = self._shorter[state]
        return steps[state][letter]

    def _add(self, stop: str) -> None:
        state = 0
        for letter in stop:
            following = self._next[state].get(letter)
            if following is None:
                following = self._next[state][letter] = len(self._next)
                self._next.append({})
                self._shorter.append(0)
                self.stop_at.append(None)
                self.num_held.append(0)
                self._depth.append(self._depth[state] + 1)
            state = following
        self.stop_at[state] = stop

    def _link(self) -> None:
        """Fill in what depends on shorter states, shortest first."""
        queue = deque([0])
        while queue:
            state = queue.popleft()
            shorter = self._shorter[state]
            if state and self.stop_at[state] is None:
                self.stop_at[state] = self.stop_at[shorter]
            is_inner = bool(self._next[state])
            self.num_held[state] = self._depth[state] if is_inner else self.num_held[shorter]
            for letter, following in self._next[state].items():
                self._shorter[following] = self.after(shorter, letter) if state else 0
                queue.append(following)
