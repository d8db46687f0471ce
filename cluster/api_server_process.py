"""One API server as a child process: its launch, its one line, its end."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from cluster.api_server_launch import ApiServerLaunch

API_SERVER_COMMAND = (sys.executable, "-P", "-m", "cluster.api.server_main")


class ApiServerProcess:
    """Started at once. Both descriptors are to be waited on beside others."""

    def __init__(
        self, launch: ApiServerLaunch, command: Sequence[str] = API_SERVER_COMMAND
    ) -> None:
        self._process = subprocess.Popen(
            (*command, str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(launch.listen_fd,),
            process_group=0,  # Ctrl-C in a terminal is the supervisor's to handle
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self.end_fd = os.pidfd_open(self._process.pid)
        """Readable when the process has ended."""
        self.is_up = False
        """Whether it has said that it takes connections."""
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(msgspec.json.encode(launch))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def line_fd(self) -> int:
        """Readable when it has said its line, or ended."""
        return self._output.fileno()

    def read_line(self) -> bool:
        """Call it when `line_fd` is readable; whether it takes connections now."""
        self.is_up = bool(self._output.readline())
        return self.is_up

    def how_it_ended(self) -> str:
        """Call it when `end_fd` is readable."""
        code = self._process.wait(timeout=5.0)
        return f"exit code {code}; its log says why" if code >= 0 else f"killed by signal {-code}"

    def ask_to_end(self) -> None:
        """It then takes no more connections, and ends when its answers are given."""
        if self._process.poll() is None:
            self._process.terminate()

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
        if self.end_fd >= 0:
            os.close(self.end_fd)
            self.end_fd = -1
        return was_killed
