"""Worker processes on this host, as children of the supervisor.

They are forked from a nursery that has their code, or started afresh. Each gets its launch on
standard input and its own process group, so that Ctrl-C in a terminal reaches only the
supervisor, which ends them in order. They end with the supervisor, however that ends
(`cluster.orphans`). What they write is shown with their name before it.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from msgspec.structs import replace

from cluster.backend import Place, RankExit, Report, WorkerLaunch, encode_launch
from cluster.cores import deal_cores
from cluster.errors import BackendError
from cluster.logs import EventLog, is_routine
from cluster.loss_reasons import reason_of_exit
from cluster.rank_nursery import RankNursery
from cluster.rank_process import RankProcess
from cluster.weight_keeper import WeightKeeper

WORKER_COMMAND = (sys.executable, "-P", "-m", "cluster.worker_main")

LAST_WORDS_LINES = 12
LAST_WORDS_WAIT_S = 0.5
"""For what a dead process wrote to be read; somebody else may hold its pipe open."""


class LocalBackend:
    """Plain processes; `cores` are dealt out to `num_ranks` ranks of all groups."""

    def __init__(
        self,
        report: Report,
        *,
        num_ranks: int,
        cores: Sequence[int],
        log: EventLog,
        command: Sequence[str] = WORKER_COMMAND,
        weights_key: str = "",
        forks: bool = False,
    ) -> None:
        """
        Args:
            weights_key: what ranks show to get weights that are kept for them; empty: none are.
            forks: ranks come from a nursery, if they can, not from `command`.
        """
        self._weights_key = weights_key
        self._forks = forks
        self._nursery: RankNursery | None = None
        self._keeper: WeightKeeper | None = None
        self._report = report
        self._log = log
        self._command = tuple(command)
        self._shares = deal_cores(cores, num_ranks) if cores else ((),) * num_ranks
        self._ranks: dict[tuple[int, int], list[_LocalRank]] = {}

    def open(self, timeout_s: float) -> str:
        """Nothing to bring up but what forks ranks and keeps weights: the host is there."""
        if self._forks:
            try:
                self._nursery = RankNursery(self._log, load_timeout_s=timeout_s)
            except OSError as error:  # ranks are then started afresh
                self._log.warning("nursery_not_started", error=error)
        if self._weights_key:
            try:
                self._keeper = WeightKeeper(self._weights_key, self._log)
            except OSError as error:  # ranks then read and hold their own
                self._log.warning("weights_not_kept", error=error)
        return ""

    def avoid(self, nodes: Collection[str]) -> None:
        """There is only this host; an engine that knows that drains no nodes."""

    def forget_code(self) -> None:
        if self._nursery is not None:
            self._nursery.forget_code()

    def place(
        self, group: int, epoch: int, num_stages: int, ranks_per_stage: int, timeout_s: float
    ) -> tuple[Place, ...]:
        """Every rank is on this host; the cores of a rank stay the same in each epoch."""
        num_ranks = num_stages * ranks_per_stage
        return tuple(
            Place(
                rank=rank,
                node="local",
                host="127.0.0.1",
                cores=self._shares[(group * num_ranks + rank) % len(self._shares)],
                gpu=group * num_ranks + rank,
                keeper="" if self._keeper is None else self._keeper.name,
            )
            for rank in range(num_ranks)
        )

    def start(self, launches: Sequence[WorkerLaunch], timeout_s: float) -> None:
        if launches[0].runner.device == "cuda" and len(launches) > 1:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                self._start(with_meeting_place(launches, listener))
        else:
            self._start(launches)

    def _start(self, launches: Sequence[WorkerLaunch]) -> None:
        for launch in launches:
            try:
                rank = _LocalRank(self._process(launch), launch, self._report, self._log)
            except OSError as error:
                raise BackendError(
                    f"cannot start worker {launch.name} as {' '.join(self._command)}: {error}"
                ) from error
            self._ranks.setdefault((launch.group, launch.epoch), []).append(rank)

    def _process(self, launch: WorkerLaunch) -> RankProcess:
        inherited = launch.rendezvous.listener_fd
        if self._nursery is not None and inherited is None:
            try:
                return self._nursery.fork()
            except BackendError as error:
                self._log.warning("rank_not_forked", worker=launch.name, error=error)
        return subprocess.Popen(
            (*self._command, str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
            pass_fds=() if inherited is None else (inherited,),
        )

    def stop(self, group: int, epoch: int, timeout_s: float) -> None:
        _end(self._ranks.pop((group, epoch), ()), timeout_s)

    def give_up(self) -> None:
        """Nothing here waits for room."""

    def close(self, timeout_s: float) -> None:
        ranks = [rank for group in self._ranks.values() for rank in group]
        self._ranks.clear()
        _end(ranks, timeout_s)
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None


def with_meeting_place(
    launches: Sequence[WorkerLaunch], listener: socket.socket
) -> list[WorkerLaunch]:
    """Tell GPU ranks the listener's address, and rank 0 that it inherits the listener.

    It listens before any rank starts, so that no port is found free and then taken.
    """
    host, port = listener.getsockname()
    told = []
    for launch in launches:
        fd = listener.fileno() if launch.rank == 0 else None
        place = replace(launch.rendezvous, store_host=host, store_port=port, listener_fd=fd)
        told.append(replace(launch, rendezvous=place))
    return told


class _LocalRank:
    """One child process and the two threads that listen to it."""

    def __init__(
        self, process: RankProcess, launch: WorkerLaunch, report: Report, log: EventLog
    ) -> None:
        self._launch = launch
        self._report = report
        self._log = log
        self._was_asked = False
        self._last_words: deque[str] = deque(maxlen=LAST_WORDS_LINES)
        self._process = process
        log.info("worker_started", worker=launch.name, pid=self._process.pid)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._listener.start()
        self._watcher.start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(encode_launch(launch))

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for data in output:
                line = data.decode(errors="replace").rstrip()
                if not is_routine(line):
                    self._last_words.append(line)
                self._log.relay(f"worker {self._launch.name}", line)

    def _watch(self) -> None:
        code = self._process.wait()
        was_asked = self._was_asked  # not later: it may be asked to end when it is gone already
        self._listener.join(timeout=LAST_WORDS_WAIT_S)
        self._report(
            RankExit(
                group=self._launch.group,
                epoch=self._launch.epoch,
                rank=self._launch.rank,
                message=describe_exit(
                    self._process.pid, code, () if was_asked else tuple(self._last_words)
                ),
                was_asked=was_asked,
                reason=reason_of_exit(code),
            )
        )

    def ask_to_end(self) -> None:
        self._was_asked = True
        self._process.terminate()

    def end_by(self, deadline: float) -> None:
        """Wait until `deadline`, then kill; the process is gone and reported on return."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._log.warning("worker_killed", worker=self._launch.name, pid=self._process.pid)
            self._process.kill()
        self._watcher.join()


def _end(ranks: Iterable[_LocalRank], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    asked = list(ranks)
    for rank in asked:
        rank.ask_to_end()
    for rank in asked:
        rank.end_by(deadline)


def describe_exit(pid: int, code: int, last_words: Sequence[str]) -> str:
    """How a process ended, in words, with the end of what it wrote."""
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    said = f"; it last wrote:\n{chr(10).join(last_words)}" if last_words and code else ""
    return f"worker process {pid} {how}{said}"
