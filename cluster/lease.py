"""Ends a rank that its engine has given up, or cannot reach any more, while it is deaf.

A rank listens to its engine between steps. In a step it is deaf: stuck in a kernel, or in a
collective with a rank that is gone, it would hear nothing for ever. So a thread of its own holds a
second connection. When the engine says there that the rank is fenced, or has not been there for
too long, and the rank is still deaf, the process ends at once.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable

from cluster.backend import WorkerLaunch
from cluster.errors import LinkLost
from cluster.links.dealer import DealerLink
from cluster.links.sockets import LinkLimits
from cluster.logs import EventLog
from cluster.loss_reasons import EXIT_FENCED
from cluster.messages.clients import Refusal
from cluster.messages.workers import Stop, WorkerLease
from cluster.wakeup import WakePipe
from cluster.wire import FROM_ENGINE, PROTOCOL_VERSION, TO_ENGINE

STOP_WAIT_S = 0.5
"""Between being fenced and ending: a rank that is not stuck ends by itself in order."""

REDIAL_S = 5.0
"""For one try to reach the engine, which a busy machine may take long for,"""

PAUSE_S = 0.1
"""and between two of them."""

JOIN_S = 1.0
"""For the thread to end with its rank; it ends nobody from then on."""


class Lease:
    """Use as a context manager around the life of a rank that has its process to itself."""

    def __init__(
        self,
        launch: WorkerLaunch,
        log: EventLog,
        *,
        end: Callable[[int], None] = os._exit,
        stop_wait_s: float = STOP_WAIT_S,
    ) -> None:
        """`end`: what ends the process, from any thread."""
        self._launch = launch
        self._log = log
        self._end = end
        self._stop_wait_s = stop_wait_s
        self._patience_s = max(launch.takeover_s, launch.engine_timeout_s)
        self._listens = False
        self._is_over = threading.Event()
        self._wake = WakePipe()
        self._thread = threading.Thread(target=self._hold, name="lease", daemon=True)

    def __enter__(self) -> "Lease":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._wake.wake()
        self._thread.join(JOIN_S)

    def set_listening(self, listens: bool) -> None:
        """Whether the rank waits for its engine's next word, and so needs nobody to hear for it."""
        self._listens = listens

    def _hold(self) -> None:
        """Keep the connection, and count for how long there is none while the rank is deaf."""
        reached_at: float | None = None
        while not self._is_over.is_set():
            now = time.monotonic()
            if self._reach_engine():
                reached_at = time.monotonic()
            elif self._listens:  # it notices by itself, and may wait for another engine
                reached_at = now
            elif self._is_over.is_set():
                return
            elif reached_at is not None and time.monotonic() - reached_at > self._patience_s:
                self._end_now(f"has not reached its engine for {self._patience_s:g} s")
            self._is_over.wait(PAUSE_S)

    def _reach_engine(self) -> bool:
        """Hold a connection until it ends; False if there was none to hold."""
        launch = self._launch
        limits = LinkLimits(
            max_message_bytes=FROM_ENGINE.max_bytes, peer_timeout_s=launch.engine_timeout_s
        )
        with DealerLink(launch.address, limits, launch.link_keys) as link:
            try:
                link.wait_connected(min(REDIAL_S, self._patience_s))
                link.send(TO_ENGINE.encode(self._hello()))
            except LinkLost:
                return False
            with contextlib.suppress(LinkLost):
                self._listen(link)
        return True

    def _listen(self, link: DealerLink) -> None:
        """Until the end of the rank or of the connection.

        Raises:
            LinkLost: of the connection.
        """
        while not self._is_over.is_set():
            frame = link.take()
            if frame is None:
                link.wait(None, (self._wake.fd,))
            elif isinstance(FROM_ENGINE.decode(frame), Stop | Refusal):
                is_stuck = not self._is_over.wait(self._stop_wait_s)
                if is_stuck:
                    self._end_now("was told to end")

    def _end_now(self, why: str) -> None:
        self._log.error("lease_over", why=f"the rank {why}, and is stuck")
        self._end(EXIT_FENCED)

    def _hello(self) -> WorkerLease:
        launch = self._launch
        return WorkerLease(
            protocol=PROTOCOL_VERSION,
            engine_id=launch.engine_id,
            key=launch.key,
            group=launch.group,
            epoch=launch.epoch,
            rank=launch.rank,
        )
