"""The HTTP front ends of one cluster: processes that share a port, each a client of the engine.

One that ends by itself is started again, after a pause that grows if that helps nothing. Until
then the others serve on; what was running in it is aborted by the engine, since its connection
is gone, and connections that it had not accepted yet go to the next one that accepts.
"""

import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.api_server_launch import ApiServerLaunch
from cluster.child_process import ChildProcess
from cluster.errors import StartFailed
from cluster.http_config import HttpConfig
from cluster.listener import Listener
from cluster.logs import EventLog

API_SERVER_COMMAND = (sys.executable, "-P", "-m", "cluster.api.server_main")

LONGEST_PAUSE_S = 5.0
HEALTHY_S = 30.0
"""One that lived this long is started again at once."""


@dataclass(slots=True)
class _Place:
    """One of the processes, or the pause until it is started again."""

    number: int
    process: ChildProcess | None = None
    is_up: bool = False
    """Whether the process has said that it takes connections."""
    started_s: float = 0.0
    pause_s: float = 0.0
    start_at: float | None = None
    successor: ChildProcess | None = None
    """One that will take its place when it takes connections."""


class ApiServers:
    """Waited for by the supervisor: `fds` and `next_deadline`, then `look`."""

    def __init__(
        self,
        config: HttpConfig,
        listener: Listener,
        *,
        drain_s: float,
        recovery_s: float,
        log_level: str,
        log: EventLog,
        command: Sequence[str] = API_SERVER_COMMAND,
    ) -> None:
        """Nothing is started yet; connections wait."""
        self._config = config
        self._listener = listener
        self._drain_s, self._recovery_s, self._log_level = drain_s, recovery_s, log_level
        self._log = log
        self._command = command
        self._places = [_Place(number) for number in range(config.api_servers)]
        self._front_address = self._key_file = self._metrics_dir = ""
        self.are_up = False
        """Whether each one has taken connections once."""
        self._to_replace: list[_Place] = []
        """The first one is being replaced."""
        self._leaving: list[ChildProcess] = []
        """That have been replaced, and finish their answers."""
        self._replaced: str | None = None
        """What came of the last replacement, until it is asked for."""

    @property
    def url(self) -> str:
        return self._listener.url

    def start(self, front_address: str, key_file: str, metrics_dir: str = "") -> None:
        """Start all of them; the engine need not be ready."""
        self._front_address, self._key_file = front_address, key_file
        self._metrics_dir = metrics_dir
        for place in self._places:
            self._start(place)

    def _start(self, place: _Place) -> None:
        place.process = self._begin(place)
        place.started_s, place.start_at, place.is_up = time.monotonic(), None, False

    def _begin(self, place: _Place) -> ChildProcess:
        launch = ApiServerLaunch(
            number=place.number,
            listen_fd=self._listener.socket.fileno(),
            front_address=self._front_address,
            key_file=self._key_file,
            http=self._config,
            drain_s=self._drain_s,
            recovery_s=self._recovery_s,
            log_level=self._log_level,
            metrics_dir=self._metrics_dir,
            # Beside that folder, since paths of sockets must be short.
            siblings_dir=self._metrics_dir and str(Path(self._metrics_dir).parent),
        )
        process = ChildProcess(self._command, launch, (launch.listen_fd,))
        self._log.info("api_server_started", number=place.number, pid=process.pid)
        return process

    def replace(self) -> None:
        """Let a new process take the place of each one, one after the other. The old one takes no
        more connections then, and ends when its answers are given, or after `drain_s`."""
        self._to_replace = list(self._places)
        self._replace_next()

    def replaced(self) -> str | None:
        """Once, when `replace` is done: why it was given up, or empty. None: nothing is done."""
        replaced, self._replaced = self._replaced, None
        return replaced

    def _replace_next(self) -> None:
        while self._to_replace and self._to_replace[0].process is None:
            self._to_replace.pop(0)  # its next start is a new one anyway
        if self._to_replace:
            self._to_replace[0].successor = self._begin(self._to_replace[0])
        else:
            self._replaced = ""

    def _look_at_successor(self, place: _Place, ready: Collection[int], now: float) -> None:
        process = place.successor
        assert process is not None
        if process.line_fd in ready and process.read_line():
            if place.process is not None:
                place.process.ask_to_end()
                self._leaving.append(place.process)
            place.process, place.successor = process, None
            place.started_s, place.start_at, place.is_up = now, None, True
            self._log.info("api_server_replaced", number=place.number, pid=process.pid)
            self._to_replace.remove(place)
            self._replace_next()
        elif process.end_fd in ready:
            how = process.how_it_ended()
            process.close()
            place.successor, self._to_replace = None, []
            self._replaced = f"the new API server {place.number} ended while it started: {how}"

    @property
    def pids(self) -> list[int]:
        """Of those that run."""
        return [place.process.pid for place in self._places if place.process is not None]

    @property
    def fds(self) -> list[int]:
        """Readable when there is something to `look` at."""
        found = [process.end_fd for process in self._leaving]
        for place in self._places:
            if place.successor is not None:
                found += [place.successor.end_fd, place.successor.line_fd]
            if place.process is not None:
                found.append(place.process.end_fd)
                if not place.is_up:
                    found.append(place.process.line_fd)
        return found

    @property
    def next_deadline(self) -> float | None:
        """When `look` has one to start again."""
        return min((p.start_at for p in self._places if p.start_at is not None), default=None)

    def look(self, ready: Collection[int]) -> None:
        """See who takes connections now and who has ended, and start those again.

        Raises:
            StartFailed: one ended before all had taken connections once.
        """
        now = time.monotonic()
        for left in [process for process in self._leaving if process.end_fd in ready]:
            self._leaving.remove(left)
            self._log.info("api_server_left", pid=left.pid, how=left.how_it_ended())
            left.close()
        for place in self._places:
            if place.successor is not None:
                self._look_at_successor(place, ready, now)
            process = place.process
            if process is None:
                if place.start_at is not None and now >= place.start_at:
                    self._start(place)
                continue
            if not place.is_up and process.line_fd in ready and process.read_line():
                place.is_up = True
                self._log.info("api_server_listens", number=place.number, url=self.url)
            if process.end_fd in ready:
                self._ended(place, process, now)
        self.are_up = self.are_up or all(p.process and p.is_up for p in self._places)

    def _ended(self, place: _Place, process: ChildProcess, now: float) -> None:
        how = process.how_it_ended()
        process.close()
        place.process = None
        if not self.are_up:
            raise StartFailed(f"API server {place.number} ended while it started: {how}")
        if now - place.started_s >= HEALTHY_S:
            place.pause_s = 0.0
        place.start_at = now + place.pause_s
        self._log.error("api_server_ended", number=place.number, how=how, again_in_s=place.pause_s)
        place.pause_s = min(max(0.5, 2 * place.pause_s), LONGEST_PAUSE_S)

    def end(self, timeout_s: float) -> None:
        """Take no more connections, let answers be given for `timeout_s`, then kill."""
        self._listener.close()
        processes = [*self._leaving]
        for place in self._places:
            processes += [it for it in (place.process, place.successor) if it is not None]
        self._places.clear()
        self._to_replace.clear()
        self._leaving.clear()
        for process in processes:
            process.ask_to_end()
        deadline = time.monotonic() + timeout_s
        num_killed = sum(p.close(max(0.0, deadline - time.monotonic())) for p in processes)
        self._log.info("api_servers_ended", num_killed=num_killed)
