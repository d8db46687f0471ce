"""Drives a backend from a thread of its own, so that the supervisor never waits for one."""

import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cluster.backend import Backend, Place, RankExit, WorkerLaunch
from cluster.errors import BackendError


@dataclass(frozen=True, slots=True)
class BackendOpened:
    """What ranks run on is up; see `Backend.open` for the host."""

    seconds: float
    host: str = ""


@dataclass(frozen=True, slots=True)
class GroupStarted:
    """The processes of a group are started."""

    group: int
    epoch: int
    seconds: float


@dataclass(frozen=True, slots=True)
class GroupEnded:
    """No process of this epoch is left."""

    group: int
    epoch: int


@dataclass(frozen=True, slots=True)
class BackendFailed:
    """Something could not be done; `group` is None if it concerns all."""

    message: str
    group: int | None = None
    epoch: int = 0


Happening: TypeAlias = BackendOpened | GroupStarted | GroupEnded | BackendFailed | RankExit

LaunchMaker: TypeAlias = Callable[[int, int, Sequence[Place]], Sequence[WorkerLaunch]]
"""(group, epoch, places) to what each rank is told."""


class BackendThread:
    """Does what it is asked, one thing after the other, and tells what came of it.

    The thread lives until `close`, since processes that it starts end with it
    (`cluster.orphans`).
    """

    def __init__(self, backend: Backend, tell: Callable[[Happening], None]) -> None:
        self._backend = backend
        self._tell = tell
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="backend", daemon=True)
        self._thread.start()

    def open(self, timeout_s: float) -> None:
        def job() -> None:
            began = time.monotonic()
            host = self._backend.open(timeout_s)
            self._tell(BackendOpened(time.monotonic() - began, host))

        self._submit(job)

    def avoid(self, nodes: Collection[str]) -> None:
        """Place no ranks on these nodes from now on."""
        self._submit(lambda: self._backend.avoid(nodes))

    def forget_code(self) -> None:
        """Ranks from now on have the code that is installed then."""
        self._submit(self._backend.forget_code)

    def start(
        self,
        group: int,
        epoch: int,
        num_stages: int,
        ranks_per_stage: int,
        launches: LaunchMaker,
        timeout_s: float,
    ) -> None:
        """Place and start a group's ranks."""

        def job() -> None:
            began = time.monotonic()
            places = self._backend.place(group, epoch, num_stages, ranks_per_stage, timeout_s)
            self._backend.start(launches(group, epoch, places), timeout_s)
            self._tell(GroupStarted(group, epoch, time.monotonic() - began))

        self._submit(job, group, epoch)

    def stop(self, group: int, epoch: int, timeout_s: float) -> None:
        """End what is left of a group's ranks."""

        def job() -> None:
            self._backend.stop(group, epoch, timeout_s)
            self._tell(GroupEnded(group, epoch))

        self._submit(job, group, epoch)

    def close(self, timeout_s: float, patience_s: float) -> bool:
        """End everything; False if it takes longer than both together.

        What waits to be done is dropped; what is being done may first come to its end, unless it
        waits for room.
        """
        self._is_closing.set()
        self._backend.give_up()
        self._jobs.put(lambda: self._backend.close(timeout_s))
        self._jobs.put(None)
        self._thread.join(timeout_s + patience_s)
        return not self._thread.is_alive()

    def _submit(self, job: Callable[[], None], group: int | None = None, epoch: int = 0) -> None:
        def guarded() -> None:
            if self._is_closing.is_set():
                return
            try:
                job()
            except BackendError as error:
                self._tell(BackendFailed(str(error), group, epoch))
            except Exception as error:  # a bug, or Ray's: to be told, not to end this thread
                self._tell(BackendFailed(f"{type(error).__name__}: {error}", group, epoch))

        self._jobs.put(guarded)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
