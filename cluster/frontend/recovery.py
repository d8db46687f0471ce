"""Outputs whose connection is gone, and until when they wait for another one.

Plain state for `FrontSession`, without I/O. What a caller has of an output stays; the rest is
computed by whatever engine answers next, from the tokens that are here (`Request.output`).
"""

import math

from cluster.frontend.requests import LiveOutput, LiveRequest
from scheduler.request import Finish


class Orphans:
    """Live outputs that no engine works on.

    An output waits for at most `recovery_s` from when its connection was lost. A connection that
    is lost again before the output had another token, and soon, is no fresh start: else a
    request that ends every engine would go round for ever.
    """

    def __init__(self, recovery_s: float) -> None:
        self.recovery_s = recovery_s
        """0: there is no waiting."""
        self._outputs: list[tuple[LiveRequest, LiveOutput]] = []
        self._in_line: dict[int, tuple[LiveRequest, LiveOutput]] = {}
        """By handle: those that the present engine takes one after the other, since they may be the
        cause of the ends of others. They wait for as long as that takes."""

    def __len__(self) -> int:
        return len(self._outputs) + len(self._in_line)

    def add(self, live: LiveRequest, output: LiveOutput, now_s: float, held_s: float) -> None:
        """Have an output wait whose last connection was ready for `held_s`."""
        if output.lost_s is None or held_s >= self.recovery_s:
            output.lost_s = now_s
        self._outputs.append((live, output))

    def line_up(self, live: LiveRequest, output: LiveOutput) -> None:
        """Have an output wait for its turn, under its handle."""
        self._in_line[output.handle] = (live, output)

    def has_turn(self, handle: int) -> tuple[LiveRequest, LiveOutput] | None:
        """The one whose turn it is, and which waits no more; None: it has not waited for it."""
        return self._in_line.pop(handle, None)

    def line_is_lost(self, now_s: float) -> None:
        """The engine is gone at which outputs stood in line."""
        for live, output in self._in_line.values():
            output.lost_s = now_s
            self._outputs.append((live, output))
        self._in_line.clear()

    def take(self) -> list[tuple[LiveRequest, LiveOutput]]:
        """All that wait; they wait no more."""
        outputs = [*self._outputs, *self._in_line.values()]
        self._outputs = []
        self._in_line.clear()
        return outputs

    def forget(self, live: LiveRequest) -> None:
        """A request is over."""
        self._outputs = [(other, output) for other, output in self._outputs if other is not live]
        for handle in [handle for handle, (other, _) in self._in_line.items() if other is live]:
            del self._in_line[handle]

    @property
    def next_deadline_s(self) -> float | None:
        """When `expire` has something to do."""
        ends = [min(self._end_of(output), _own_end(live)) for live, output in self._outputs]
        ends += [_own_end(live) for live, _ in self._in_line.values()]
        return min(ends, default=None)

    def expire(self, now_s: float) -> list[LiveRequest]:
        """End outputs whose request is over by its own `timeout_s`.

        Returns:
            Requests that have waited for too long, and wait no more.
        """
        given_up: dict[int, LiveRequest] = {}
        for handle, (live, output) in list(self._in_line.items()):
            if _own_end(live) <= now_s:
                del self._in_line[handle]
                _time_out(live, output)
        for live, output in self._outputs:
            if _own_end(live) <= now_s:
                _time_out(live, output)
            elif self._end_of(output) <= now_s:
                given_up[id(live)] = live
        self._outputs = [
            (live, output)
            for live, output in self._outputs
            if output.is_live and id(live) not in given_up
        ]
        return list(given_up.values())

    def _end_of(self, output: LiveOutput) -> float:
        assert output.lost_s is not None
        return output.lost_s + self.recovery_s


def _time_out(live: LiveRequest, output: LiveOutput) -> None:
    output.end(Finish.TIMEOUT, message="timeout_s passed")
    live.notify()


def _own_end(live: LiveRequest) -> float:
    limit_s = live.draft.options.timeout_s
    return math.inf if limit_s is None else live.submitted_s + limit_s
