"""Those who watch the engine's steps through one API server: one subscription for them all.

Each viewer has a short queue of its own; one who reads too slowly misses the oldest news and
holds up nobody. The engine is asked for news only while there is a viewer.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np

from cluster.frontend.errors import RequestError
from cluster.frontend.loop_client import LoopClient
from cluster.messages.reports import StepNews, WatchSteps

MAX_UNREAD = 20
"""News kept for a viewer, two seconds of it; then the oldest is dropped."""


class Viewer:
    """One reader's place in the audience."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque(maxlen=MAX_UNREAD)
        self._bell = asyncio.Event()

    def put(self, frame: bytes) -> None:
        self._frames.append(frame)
        self._bell.set()

    async def next(self, timeout_s: float) -> bytes | None:
        """The oldest news that is kept; None if there is none for `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._bell.wait()
        if not self._frames:
            return None
        frame = self._frames.popleft()
        if not self._frames:
            self._bell.clear()
        return frame


class StepAudience:
    """All viewers of one event loop."""

    def __init__(self, engine: LoopClient) -> None:
        self._engine = engine
        self._viewers: set[Viewer] = set()
        self._unsubscribe: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._viewers)

    def join(self) -> Viewer:
        """A new viewer, who is told soon how things are."""
        viewer = Viewer()
        self._viewers.add(viewer)
        if self._unsubscribe is None:
            self._unsubscribe = self._engine.subscribe(
                StepNews, self._take, opening=WatchSteps(True), closing=WatchSteps(False)
            )
        else:
            with contextlib.suppress(RequestError):  # it is asked again when it is back
                self._engine.tell(WatchSteps(True))
        return viewer

    def leave(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)
        if not self._viewers and self._unsubscribe is not None:
            unsubscribe, self._unsubscribe = self._unsubscribe, None
            with contextlib.suppress(RequestError):
                unsubscribe()

    def _take(self, news: StepNews) -> None:
        frame = b"data: " + msgspec.json.encode(news, enc_hook=_as_list) + b"\n\n"
        for viewer in self._viewers:
            viewer.put(frame)


def _as_list(value: object) -> list[float]:
    """A column as JSON has it; seconds to the hundredth of a millisecond."""
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"cannot write a {type(value).__name__} as JSON")
    numbers: list[float] = (
        np.round(value.astype(np.float64), 5) if value.dtype.kind == "f" else value
    ).tolist()
    return numbers
