"""A child of the supervisor: its launch on standard input, its one line, its end.

The engine core and each API server are one. Both of its descriptors are to be waited on
beside others.
"""

import contextlib
import os
import subprocess
from collections.abc import Sequence

import msgspec
from msgspec import Struct


class ChildProcess:
    """Started at once, with our process id as its last argument.

    Args:
        launch: all that it is told, as JSON; None: `tell` follows.
        pass_fds: descriptors that it inherits under their numbers.
    """

    def __init__(
        self, command: Sequence[str], launch: Struct | None, pass_fds: tuple[int, ...] = ()
    ) -> None:
        self._process = subprocess.Popen(
            (*command, str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=pass_fds,
            process_group=0,  # Ctrl-C in a terminal is the supervisor's to handle
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self.end_fd = os.pidfd_open(self._process.pid)
        """Readable when the process has ended."""
        if launch is not None:
            self.tell(launch)

    def tell(self, launch: Struct) -> None:
        """All that it is told, once; it may have ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(msgspec.json.encode(launch))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def line_fd(self) -> int:
        """Readable when it has said its line, or ended."""
        return self._output.fileno()

    def read_line(self) -> bytes:
        """What it says of itself; empty if it ended without a word. Waits for it."""
        return self._output.readline()

    def how_it_ended(self, why: str = "") -> str:
        """Call it when `end_fd` is readable. `why`: what it said itself, or it was killed for."""
        code = self._process.wait(timeout=5.0)
        how = f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
        if why:
            return f"{why} ({how})"
        return f"{how}; its log says why" if code > 0 else how

    def ask_to_end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """End it at once; `end_fd` says when it has ended. Also one that is stopped."""
        self._process.kill()

    def close(self, timeout_s: float = 0.0) -> bool:
        """Wait until `timeout_s` is over, then kill; whether it had to be killed."""
        was_killed = False
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            was_killed = True
            self._process.kill()
            self._process.wait()
        self._output.close()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if self.end_fd >= 0:
            os.close(self.end_fd)
            self.end_fd = -1
        return was_killed
