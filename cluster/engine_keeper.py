"""The engine core's process, seen from the supervisor: its start, its link, its end, its successor.

Waited for beside other things: `wait`, `next_deadline`, then `look`, which tells what has happened.
The keeper ends an engine that hangs. When one has ended, the supervisor decides whether another
one begins, and with what launch.
"""

import contextlib
import select
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from cluster.announcements import EngineListens, EngineRefuses, EngineStands, read_engine_line
from cluster.child_process import ChildProcess
from cluster.engine_launch import STANDBY, EngineLaunch
from cluster.errors import LinkLost
from cluster.hang_watch import HangWatch
from cluster.keys import ClientKeys
from cluster.links.dealer import DealerLink
from cluster.links.sockets import LinkLimits
from cluster.logs import EventLog
from cluster.messages.sockets import FromEngine, ToEngine
from cluster.messages.supervisor import Ping, Pong, SupervisorHello
from cluster.restarts import RestartLimits, Restarts
from cluster.wire import FROM_ENGINE, PROTOCOL_VERSION, TO_ENGINE

ENGINE_COMMAND = (sys.executable, "-P", "-m", "cluster.engine_main")

KILL_WAIT_S = 2.0
"""Between asking the engine's process to end, or losing its link, and killing it."""


@dataclass(frozen=True, slots=True)
class EngineListening:
    """Its sockets are bound, and it will read what is sent to it."""

    listens: EngineListens


@dataclass(frozen=True, slots=True)
class EngineSaid:
    """A message for the supervisor."""

    message: FromEngine


@dataclass(frozen=True, slots=True)
class EngineEnded:
    """No process of the engine is left."""

    how: str


@dataclass(frozen=True, slots=True)
class StandbyReady:
    """The process that `prepare` has begun has loaded its code; the next start is of that one."""

    protocol: int
    version: str


@dataclass(frozen=True, slots=True)
class StandbyFailed:
    """The process that `prepare` has begun is gone, or was given up."""

    why: str


EngineNews: TypeAlias = EngineListening | EngineSaid | EngineEnded | StandbyReady | StandbyFailed


class EngineKeeper:
    """One engine process after the other, at the same addresses."""

    def __init__(
        self,
        command: Sequence[str],
        keys: ClientKeys | None,
        *,
        limits: RestartLimits,
        start_timeout_s: float,
        hang_s: float,
        peer_timeout_s: float,
        log: EventLog,
    ) -> None:
        """
        Args:
            keys: to dial its back socket with.
            start_timeout_s: after which one that does not listen is killed.
            hang_s: silence of its loop after which it is killed; 0: none is too long.
        """
        self._command, self._keys, self._log = command, keys, log
        self._limits = LinkLimits(
            max_message_bytes=FROM_ENGINE.max_bytes, peer_timeout_s=peer_timeout_s
        )
        self._restarts, self._start_timeout_s = Restarts(limits), start_timeout_s
        self._hang_s, self._hang = hang_s, HangWatch(hang_s)
        self._launch: EngineLaunch | None = None
        self._process: ChildProcess | None = None
        self._link: DealerLink | None = None
        self._listens: EngineListens | None = None
        self._why = ""
        """What it, or we, say of its end"""
        self._kill_at: float | None = None
        """By when it must have begun to listen; or have ended, its link being lost"""
        self._start_at: float | None = None
        self._standby: ChildProcess | None = None
        self._stands = False
        """Whether that has loaded its code"""
        self._standby_until = 0.0

    # --- what the supervisor does with it ---

    def start(self, launch: EngineLaunch, pause_s: float = 0.0) -> None:
        """Begin a process, now or after a pause."""
        assert self._process is None, "one engine at a time"
        self._launch, self._start_at = launch, time.monotonic() + pause_s
        if not pause_s:
            self._begin()

    def prepare(self) -> None:
        """Begin a process that loads its code beside the one that serves, and takes its place when
        that has ended and `start` is called."""
        assert self._standby is None, "one standby at a time"
        self._standby = ChildProcess((*self._command, STANDBY), None)
        self._standby_until = time.monotonic() + self._start_timeout_s

    def give_standby_up(self) -> None:
        """It is not wanted."""
        standby, self._standby, self._stands = self._standby, None, False
        if standby is not None:
            standby.kill()
            standby.close()

    def _begin(self) -> None:
        assert self._launch is not None
        if self._standby is not None and self._stands:
            self._process, self._standby, self._stands = self._standby, None, False
            self._process.tell(self._launch)
        else:
            self._process = ChildProcess(self._command, self._launch)
        now = time.monotonic()
        self._start_at, self._kill_at = None, now + self._start_timeout_s
        self._restarts.began(now)

    def pause_s(self) -> float | None:
        """How long to wait before another one begins in place of one that has ended; None: there
        were too many."""
        return self._restarts.pause_s(time.monotonic())

    @property
    def is_linked(self) -> bool:
        """Whether what is sent now can arrive."""
        return self._link is not None

    def send(self, message: ToEngine) -> None:
        """Nothing if it is not linked: whoever comes next is told how things are then."""
        if self._link is None:
            return
        try:
            self._link.send(TO_ENGINE.encode(message))
        except LinkLost as error:  # the end of the process says why
            self._log.debug("engine_message_lost", error=error)

    # --- waiting for it ---

    @property
    def next_deadline(self) -> float | None:
        """When `look` has something to do if nothing happens."""
        is_loading = self._standby is not None and not self._stands
        load_until = self._standby_until if is_loading else None
        known = (self._start_at, self._kill_at, self._hang.next_look, load_until)
        return min((at for at in known if at is not None), default=None)

    def wait(self, timeout_s: float | None, fds: Iterable[int]) -> set[int]:
        """Sleep until there is something to `look` at, one of `fds` is readable, or time is up.

        Returns the readable ones, among them the engine's.
        """
        wanted = [*fds]
        if self._standby is not None:
            wanted.append(self._standby.end_fd)
            if not self._stands:
                wanted.append(self._standby.line_fd)
        if self._process is not None:
            wanted.append(self._process.end_fd)
            if self._listens is None:
                wanted.append(self._process.line_fd)
        if self._link is not None:
            return self._link.wait(timeout_s, wanted)
        return set(select.select(wanted, (), (), timeout_s)[0])

    def look(self, ready: Collection[int]) -> Iterator[EngineNews]:
        """What has happened, in its order."""
        now = time.monotonic()
        yield from self._look_at_standby(ready, now)
        if self._start_at is not None and now >= self._start_at:
            self._begin()
            return
        process = self._process
        if process is None:
            return
        if self._listens is None and process.line_fd in ready:
            yield from self._read_line(process, now)
        yield from self._read_link(now)
        if process.end_fd in ready:
            yield self._ended(process)
        else:
            self._keep_time(process, now)

    def _look_at_standby(self, ready: Collection[int], now: float) -> Iterator[EngineNews]:
        standby = self._standby
        if standby is None:
            return
        if not self._stands and standby.line_fd in ready:
            with contextlib.suppress(msgspec.DecodeError):  # its end follows
                line = read_engine_line(standby.read_line())
                if isinstance(line, EngineStands):
                    self._stands = True
                    yield StandbyReady(line.protocol, line.version)
                    return
        if standby.end_fd in ready:
            how = standby.how_it_ended()
            self.give_standby_up()
            yield StandbyFailed(f"the new engine process ended at once: {how}")
        elif not self._stands and now >= self._standby_until:
            self.give_standby_up()
            limit = f"start_timeout_s={self._start_timeout_s:g}"
            yield StandbyFailed(f"the new engine process did not load its code within {limit}")

    def _read_line(self, process: ChildProcess, now: float) -> Iterator[EngineNews]:
        try:
            line = read_engine_line(process.read_line())
        except msgspec.DecodeError:  # its end follows
            return
        if isinstance(line, EngineRefuses):
            self._why = line.message
            return
        assert isinstance(line, EngineListens), line
        assert self._launch is not None
        self._listens, self._kill_at = line, None
        self._link = DealerLink(line.back_address, self._limits, self._keys)
        hello = SupervisorHello(
            protocol=PROTOCOL_VERSION, engine_id=self._launch.engine_id, key=self._launch.key
        )
        self.send(hello)
        self._hang.begin(now)
        yield EngineListening(line)

    def _read_link(self, now: float) -> Iterator[EngineNews]:
        while self._link is not None:
            try:
                frame = self._link.take()
            except LinkLost:
                self._lose_link()
                self._kill_at = now + KILL_WAIT_S
                return
            if frame is None:
                return
            message = FROM_ENGINE.decode(frame)
            if isinstance(message, Pong):
                self._hang.answered()
            else:
                yield EngineSaid(message)

    def _keep_time(self, process: ChildProcess, now: float) -> None:
        match self._hang.look(now):
            case "ask":
                self.send(Ping())
            case "hangs":
                self._kill(process, f"its loop was silent for engine_hang_s={self._hang_s:g}")
        if self._kill_at is not None and now >= self._kill_at:
            limit = f"it did not listen within start_timeout_s={self._start_timeout_s:g}"
            self._kill(process, "the link to it was lost" if self._listens else limit)

    def _kill(self, process: ChildProcess, why: str) -> None:
        self._why, self._kill_at = why, None
        self._log.error("engine_killed", reason=why)
        process.kill()

    def _ended(self, process: ChildProcess) -> EngineEnded:
        ended = EngineEnded(process.how_it_ended(self._why))
        process.close()
        self._lose_link()
        self._process = self._listens = self._kill_at = None
        self._why = ""
        return ended

    def _lose_link(self) -> None:
        self._hang.end()
        if self._link is not None:
            self._link.close()
            self._link = None

    # --- the end ---

    @property
    def has_ended(self) -> bool:
        """Whether there is no process, or it is over."""
        process = self._process
        return process is None or bool(select.select([process.end_fd], (), (), 0.0)[0])

    def end(self) -> bool:
        """Make it end, if it has not; whether it had to be killed. No other one follows."""
        self.give_standby_up()
        process, self._process, self._start_at = self._process, None, None
        was_killed = False
        if process is not None:
            process.ask_to_end()
            was_killed = process.close(KILL_WAIT_S)
        self._lose_link()
        return was_killed
