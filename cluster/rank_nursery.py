"""Where CPU ranks come from within milliseconds: a process that has loaded their code, and forks.

A rank that is started afresh spends seconds on loading torch, most of a recovery. The nursery does
that once, when the cluster starts. Its ranks are children of this process, not its own; one that
ends, or hangs, is replaced. GPU ranks are started afresh: CUDA does not outlive a fork.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from cluster.errors import BackendError
from cluster.logs import EventLog
from cluster.orphans import adopting_orphans
from cluster.rank_process import AdoptedProcess

NURSERY_COMMAND = (sys.executable, "-P", "-m", "cluster.nursery_main")

NAME = "stoker-nursery"
"""As ps shows it."""

READY, ORDER = b"r", b"o"
PID_BYTES = 4

FORK_TIMEOUT_S = 10.0
"""A fork takes milliseconds; a nursery that takes longer hangs."""


class RankNursery:
    """One nursery at a time; the next one comes when it is needed. Used by one thread, with which
    the nursery ends."""

    def __init__(
        self,
        log: EventLog,
        *,
        load_timeout_s: float,
        fork_timeout_s: float = FORK_TIMEOUT_S,
        command: Sequence[str] = NURSERY_COMMAND,
    ) -> None:
        """The first one begins to load.

        Args:
            load_timeout_s: for the code to be loaded.
            fork_timeout_s: for one rank.

        Raises:
            OSError: it cannot be started.
        """
        self._log = log
        self._load_timeout_s, self._fork_timeout_s = load_timeout_s, fork_timeout_s
        self._command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._renew()

    def fork(self) -> AdoptedProcess:
        """A new rank, which waits for its launch on standard input.

        Raises:
            BackendError: none came; the next call begins with another nursery.
        """
        try:
            if self._process is None or self._process.poll() is not None:
                self._renew()
            self._wait_for_code()
            with adopting_orphans():  # the rank is one, until it is ours
                return self._order()
        except OSError as error:  # a timeout among them
            self.close()
            raise BackendError(f"the nursery has forked no rank: {error}") from error

    def _wait_for_code(self) -> None:
        if not self._is_ready:
            self._orders.settimeout(self._load_timeout_s)
            if self._orders.recv(len(READY)) != READY:
                raise ConnectionError("it ended while it loaded the code of ranks")
            self._orders.settimeout(self._fork_timeout_s)
            self._is_ready = True

    def _order(self) -> AdoptedProcess:
        stdin_end, stdin = os.pipe()
        output, output_end = os.pipe()
        pid = 0
        try:
            socket.send_fds(self._orders, [ORDER], [stdin_end, output_end])
            pid = int.from_bytes(self._orders.recv(PID_BYTES), sys.byteorder)
        finally:
            for fd in (stdin_end, output_end) if pid else (stdin_end, output_end, stdin, output):
                os.close(fd)
        if not pid:
            raise ConnectionError("it ended, or the system has no room for another process")
        return AdoptedProcess(pid, open(stdin, "wb"), open(output, "rb"))

    def forget_code(self) -> None:
        """Ranks from now on have the code that is installed now."""
        with suppress(OSError):  # the next order tries again
            self._renew()

    def close(self) -> None:
        """End it; its ranks live on."""
        if self._process is None:
            return
        self._orders.close()
        self._process.kill()
        self._process.wait()
        self._process = None

    def _renew(self) -> None:
        self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    (*self._command, str(theirs.fileno()), str(os.getpid())),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    process_group=0,
                    pass_fds=(theirs.fileno(),),
                )
            except OSError:
                ours.close()
                raise
        self._orders, self._is_ready = ours, False
        self._log.info("nursery_started", pid=self._process.pid)


def encode_pid(pid: int) -> bytes:
    """As the nursery sends it; 0: no rank."""
    return pid.to_bytes(PID_BYTES, sys.byteorder)
