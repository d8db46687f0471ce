"""A whole cluster as one child process: its start, its one line, its end.

The supervisor (`cluster.supervisor_main`) starts everything else, and ends it when it is
asked to or when its standard input ends, which it does however this process ends. So nothing
of a cluster outlives who started it.
"""

import contextlib
import select
import signal
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from cluster.announcements import ClusterFailed, ClusterReady, read_cluster_line
from cluster.config import EngineConfig, encode_config
from cluster.errors import StartFailed

SUPERVISOR_COMMAND = (sys.executable, "-P", "-m", "cluster.supervisor_main")

PARTS_OF_STOPPING = 4
"""Engine, workers, backend, and what is left; each may take `stop_timeout_s`."""


class ClusterProcess:
    """Started at once; `wait_ready` says when it serves."""

    def __init__(self, config: EngineConfig, command: Sequence[str] = SUPERVISOR_COMMAND) -> None:
        self._config = config
        self._process = subprocess.Popen(
            command,
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
        try:
            return read_cluster_line(output.readline())
        except msgspec.DecodeError:
            how = _how(self._process.wait(config.stop_timeout_s))
            raise StartFailed(
                f"the cluster's supervisor ended before it was ready ({how}); its log says why"
            ) from None

    def wait(self) -> str:
        """Wait until the cluster ends; returns how it did."""
        return _how(self._process.wait())

    def end(self) -> None:
        """End the cluster in order; kill what does not end in time. May be called twice."""
        if self.is_alive:
            self._process.send_signal(signal.SIGTERM)
        limit_s = self._config.drain_s + PARTS_OF_STOPPING * self._config.stop_timeout_s
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
