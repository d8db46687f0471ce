"""A rank's process on this host, as whoever started it sees it."""

import os
import select
import signal
import subprocess
import threading
from contextlib import suppress
from typing import IO, Protocol


class RankProcess(Protocol):
    """What is used of `subprocess.Popen`."""

    stdin: IO[bytes] | None
    """For its launch."""
    stdout: IO[bytes] | None
    """All that it writes."""

    @property
    def pid(self) -> int: ...

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, or minus the signal that ended it.

        Raises:
            subprocess.TimeoutExpired: it runs on.
        """
        ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class AdoptedProcess:
    """A child of this process that somebody else has forked."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        """It must be a child already."""
        self.pid = pid
        self.stdin: IO[bytes] | None = stdin
        self.stdout: IO[bytes] | None = stdout
        self._code: int | None = None
        self._lock = threading.Lock()
        self._end_fd = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        """As of `RankProcess`; from any thread."""
        if self._code is None:
            poll = select.poll()
            poll.register(self._end_fd, select.POLLIN)
            if not poll.poll(None if timeout is None else 1000 * timeout):
                assert timeout is not None
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        with self._lock:
            if self._code is None:
                self._code = self._reap()
            return self._code

    def _reap(self) -> int:
        ended = os.waitid(os.P_PIDFD, self._end_fd, os.WEXITED)
        assert ended is not None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._end_fd, number)

    def __del__(self) -> None:
        os.close(self._end_fd)
