"""The engine core as a child process: its launch, its one line, its end."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec

from cluster.announcements import EngineListens, read_engine_line
from cluster.engine_launch import EngineLaunch
from cluster.errors import StartFailed

ENGINE_COMMAND = (sys.executable, "-P", "-m", "cluster.engine_main")


class EngineProcess:
    """Started at once. Both descriptors are to be waited on beside others."""

    def __init__(self, launch: EngineLaunch, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self._process = subprocess.Popen(
            (*command, str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # Ctrl-C in a terminal is the supervisor's to handle
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self.end_fd = os.pidfd_open(self._process.pid)
        """Readable when the process has ended."""
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(msgspec.json.encode(launch))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def line_fd(self) -> int:
        """Readable when the engine has said its line, or ended."""
        return self._output.fileno()

    def read_line(self) -> EngineListens:
        """The line that says where the engine listens; call it when `line_fd` is readable.

        Raises:
            StartFailed: it cannot listen, or ended without a word.
        """
        try:
            said = read_engine_line(self._output.readline())
        except msgspec.DecodeError:
            raise StartFailed(f"the engine process ended at once: {self.how_it_ended()}") from None
        if not isinstance(said, EngineListens):
            raise StartFailed(said.message)
        return said

    def how_it_ended(self) -> str:
        """Call it when `end_fd` is readable."""
        code = self._process.wait(timeout=5.0)
        return f"exit code {code}; its log says why" if code >= 0 else f"killed by signal {-code}"

    def end(self, timeout_s: float) -> bool:
        """Ask nicely, kill after `timeout_s`; whether it had to be killed."""
        if self._process.poll() is None:
            self._process.terminate()
        return self.wait(timeout_s)

    def wait(self, timeout_s: float) -> bool:
        """Wait until `timeout_s` is over, then kill; whether it had to be killed."""
        deadline = time.monotonic() + timeout_s
        was_killed = False
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            was_killed = True
            self._process.kill()
            self._process.wait()
        self._output.close()
        if self.end_fd >= 0:
            os.close(self.end_fd)
            self.end_fd = -1
        return was_killed
