"""An event loop whose clock jumps to whatever comes next, so that delays are exact and cost
nothing."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import TypeVar

from stoker.bench.stream import Clock

Result = TypeVar("Result")


class JumpingSelector(selectors.SelectSelector):
    """Never waits: what a wait would have taken is added to the time instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits, and nothing is going to happen"
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jumping = JumpingSelector()
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.now


def run_in_virtual_time(make: Callable[[Clock], Coroutine[None, None, Result]]) -> Result:
    """Run what `make` returns when given the virtual clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        return runner.run(make(loop.time))
