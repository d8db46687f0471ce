"""Processes that stand for the ranks of a group and run tasks for tests.

A task is a function of `tests.worker.rank_tasks`; it gets its rank first. The processes load
torch once and are used by many tests; one that a test kills is replaced when it is next needed.
"""

import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

ANSWER_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Raised:
    """An exception in a task, in parts that can be sent."""

    kind: str
    message: str
    trace: str
    peer: int | None
    step: int | None


class RankProcesses:
    """As many processes as have been asked for. `close` ends each by its pid."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._links: dict[int, Connection] = {}

    def run(self, task: Callable[..., object], size: int, *arguments: object) -> list[object]:
        """Run `task(rank, size, *arguments)` on the first ranks; an exception fails the test."""
        for rank in range(size):
            self.start(rank, task, size, *arguments)
        answers = [self.answer(rank) for rank in range(size)]
        for rank, answer in enumerate(answers):
            if isinstance(answer, Raised):
                raise AssertionError(f"on rank {rank}:\n{answer.trace}")
        return answers

    def start(self, rank: int, task: Callable[..., object], *arguments: object) -> None:
        """Let `rank` run `task(rank, *arguments)`; `answer` waits for what it returns or raises."""
        self.ensure(range(rank + 1))
        self._links[rank].send((task, (rank, *arguments)))

    def answer(self, rank: int) -> object:
        """What the task returned, or `Raised`, or what it said by `rank_tasks.say` before."""
        link = self._links[rank]
        assert link.poll(ANSWER_TIMEOUT_S), f"rank {rank} did not answer in {ANSWER_TIMEOUT_S} s"
        return link.recv()

    def tell(self, rank: int, message: object) -> None:
        """Send what the task waits for by `rank_tasks.hear`."""
        self._links[rank].send(message)

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def ensure(self, ranks: Sequence[int]) -> None:
        """Start those that do not run, all at once, and wait until they have loaded torch."""
        new = [rank for rank in ranks if rank not in self._processes]
        for rank in new:
            ours, theirs = socket.socketpair()
            with theirs:
                self._processes[rank] = subprocess.Popen(
                    [sys.executable, "-m", "tests.worker.rank_processes", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                )
            self._links[rank] = Connection(ours.detach())
        for rank in new:
            assert self.answer(rank) == "ready"

    def kill(self, rank: int) -> None:
        """End one as the kernel would."""
        process = self._processes.pop(rank)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        self._links.pop(rank).close()

    def close(self) -> None:
        for rank in list(self._processes):
            self.kill(rank)


def main(link: Connection) -> None:
    """Run tasks until the parent is gone."""
    from tests.worker import rank_tasks  # loads torch; the parent's side need not

    rank_tasks.set_up(link)
    link.send("ready")
    while True:
        try:
            task, arguments = link.recv()
        except EOFError:
            return
        try:
            answer = task(*arguments)
        except BaseException as error:  # also KeyboardInterrupt: it is what a test asks for
            answer = Raised(
                kind=type(error).__name__,
                message=str(error),
                trace=traceback.format_exc(),
                peer=getattr(error, "peer", None),
                step=getattr(error, "step", None),
            )
        link.send(answer)


if __name__ == "__main__":
    from tests.worker.rank_processes import main as main_by_import_path

    main_by_import_path(Connection(int(sys.argv[1])))
