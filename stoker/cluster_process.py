"""A whole cluster as one child process: its start, its one line, its end.

The supervisor (`cluster.supervisor_main`) starts everything else, and ends it when it is
asked to or when its standard input ends, which it does however this process ends. So nothing
of a cluster outlives who started it.
"""

import contextlib
import select
import subprocess
import sys
from collections.abc import Sequence
from typing import IO

import msgspec

from cluster.announcements import ClusterFailed, ClusterReady, read_cluster_line
from cluster.config import encode_config
from cluster.engine_config import EngineConfig
from cluster.errors import StartFailed

SUPERVISOR_COMMAND = (sys.executable, "-P", "-m", "cluster.supervisor_main")

PARTS_OF_STOPPING = 4
"""Engine, workers, backend, and what is left; each may take `stop_timeout_s`."""


class ClusterProcess:
    """Started at once; `wait_ready` says when it serves."""

    def __init__(self, config: EngineConfig, command: Sequence[str] | None = None) -> None:
        self._config = config
        self._process = subprocess.Popen(
            SUPERVISOR_COMMAND if command is None else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # Ctrl-C in a terminal is for us to handle
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what it says instead is read below
            self._process.stdin.write(encode_config(config) + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self) -> ClusterReady:
        """Wait until the cluster serves.

        Raises:
            StartFailed: it did not come up, for the reason that the message gives, or not in
                `start_timeout_s`. Nothing of it is left.
        """
        try:
            said = self._read_line()
        except BaseException:
            self.end()
            raise
        if not isinstance(said, ClusterReady):
            self.end()
            raise StartFailed(said.message)
        return said

    def _read_line(self) -> ClusterReady | ClusterFailed:
        output, config = self._process.stdout, self._config
        assert output is not None
        limit_s = config.start_timeout_s + PARTS_OF_STOPPING * config.stop_timeout_s
        if not select.select([output], [], [], limit_s)[0]:
            raise StartFailed(
                f"the cluster was not ready within {config.start_timeout_s:g} s, nor did it say "
                "why; its log may. Raise start_timeout_s if it only needs longer"
            )
        line = output.readline()
        try:
            return read_cluster_line(line)
        except msgspec.DecodeError:
            self.end()
            said = f"said {line!r:.80}" if line else "ended without a word"
            raise StartFailed(
                f"the cluster's supervisor {said} ({self.wait()}); its log says why"
            ) from None

    def wait(self) -> str:
        """Wait until the cluster ends; returns how it did."""
        return _how(self._process.wait())

    def end(self) -> None:
        """End the cluster in order; kill what does not end in time. May be called twice."""
        config = self._config
        # The end of its standard input ends a supervisor; a signal would also reach what
        # libraries have installed for it.
        self._close(self._process.stdin)
        try:
            self._process.wait(config.drain_s + PARTS_OF_STOPPING * config.stop_timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            self._close(self._process.stdout)

    def _close(self, pipe: IO[bytes] | None) -> None:
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
