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

    def __len__(self) -> int:
        return len(self._outputs)

    def add(self, live: LiveRequest, output: LiveOutput, now_s: float, held_s: float) -> None:
        """Have an output wait whose last connection was ready for `held_s`."""
        if output.lost_s is None or held_s >= self.recovery_s:
            output.lost_s = now_s
        self._outputs.append((live, output))

    def take(self) -> list[tuple[LiveRequest, LiveOutput]]:
        """All that wait; they wait no more."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def forget(self, live: LiveRequest) -> None:
        """A request is over."""
        self._outputs = [(other, output) for other, output in self._outputs if other is not live]

    @property
    def next_deadline_s(self) -> float | None:
        """When `expire` has something to do."""
        ends = (min(self._end_of(output), _own_end(live)) for live, output in self._outputs)
        return min(ends, default=None)

    def expire(self, now_s: float) -> list[LiveRequest]:
        """End outputs whose request is over by its own `timeout_s`.

        Returns:
            Requests that have waited for too long, and wait no more.
        """
        given_up: dict[int, LiveRequest] = {}
        for live, output in self._outputs:
            if _own_end(live) <= now_s:
                output.end(Finish.TIMEOUT, message="timeout_s passed")
                live.notify()
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


def _own_end(live: LiveRequest) -> float:
    limit_s = live.draft.options.timeout_s
    return math.inf if limit_s is None else live.submitted_s + limit_s
