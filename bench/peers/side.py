"""One side of the comparison: a process that answers traces when it is its turn, and else not.

Sides that are compared live at the same time and take turns, so whatever else the machine does
meets them all. A peer that waits is stopped (SIGSTOP), for some spin while they wait.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.peers.driver import Ran
from bench.report import ROOT
from stoker.bench.peak_memory import PeakMemory, tree_bytes

END_S = 30.0
"""For a side to end by itself once its input has."""


class SideFailed(Exception):
    """A side could not start or answer; the message says why."""


class Stopped(SideFailed):
    """A run or a start had not ended when its time was up."""


class Side:
    """Started at once; `wait_ready` says when its first token is there."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        can_be_stopped: bool,
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._can_be_stopped = can_be_stopped
        self._started_s = time.perf_counter()
        with log.open("w") as lines:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=lines,
                text=True,
                start_new_session=True,  # a group of its own, to stop and to end as one
            )
        self.about = ""
        self.start_s = 0.0
        """From launch to the first token."""
        self.peak_bytes = 0
        """Most memory seen while it started and between runs (Linux PSS, all its processes)."""

    def wait_ready(self, limit_s: float) -> None:
        """Raises Stopped or SideFailed."""
        with PeakMemory(self._process.pid) as peak:
            self.about = str(self._answer(limit_s)["about"])
        self.start_s = time.perf_counter() - self._started_s
        self.peak_bytes = peak.bytes

    def run(self, trace: Path, turn: int, limit_s: float, most_tokens: int | None = None) -> Ran:
        """Answer a whole trace.

        Raises:
            Stopped: it took longer than `limit_s`; the side has been ended.
            SideFailed
        """
        assert self._process.stdin is not None
        asked = {"path": str(trace.resolve()), "turn": turn, "most_tokens": most_tokens}
        with self._awake():
            try:
                self._process.stdin.write(json.dumps(asked) + "\n")
                self._process.stdin.flush()
            except (BrokenPipeError, ValueError):  # it is gone, or was ended here
                raise SideFailed(f"it has ended: {self._last_words()}") from None
            answer = self._answer(limit_s)
            self.peak_bytes = max(self.peak_bytes, tree_bytes(self._process.pid))
        if "error" in answer:
            raise SideFailed(str(answer["error"]))
        return Ran(**answer)  # type: ignore[arg-type]  # its own fields, from JSON

    def rest(self) -> None:
        """Compute nothing until the next run."""
        if self._can_be_stopped:
            self._signal(signal.SIGSTOP)

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        if self._can_be_stopped:
            self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.rest()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _answer(self, limit_s: float) -> dict[str, object]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
            self.kill()
            raise Stopped(f"stopped after {limit_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise SideFailed(f"it ended: {self._last_words()}")
        answer: dict[str, object] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "it said nothing"

    def close(self) -> None:
        """Let it end by itself, or end it."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._close_output()

    def kill(self) -> None:
        """End it now, with all that it started in its group; our clusters end by themselves."""
        assert self._process.stdin is not None
        self._signal(signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._close_output()

    def _close_output(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.close()
