"""The most memory that a tree of processes used at once, sampled while a `with` block runs."""

import os
import threading
import time
from pathlib import Path

import psutil

SAMPLE_S = 0.2
"""Shortest pause between two samples."""
MOST_SHARE = 0.02
"""Of the time that may go into sampling, during which a process cannot map memory."""


def proportional_bytes(pid: int) -> int:
    """Memory of one process, pages shared by k processes counted as 1/k each (Linux PSS)."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def tree_bytes(pid: int, without: int | None = None) -> int:
    """Memory of a process and all its descendants, one of which may be left out."""
    total = 0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        try:
            total += 0 if process.pid == without else proportional_bytes(process.pid)
        except (OSError, psutil.Error):  # it ended meanwhile
            continue
    return total


class PeakMemory:
    """`with PeakMemory() as peak: ...; peak.bytes` for this process and its children."""

    def __init__(self, pid: int | None = None, without: int | None = None) -> None:
        self.bytes = 0
        self._without = without
        self._pid = pid if pid is not None else os.getpid()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        pause_s = SAMPLE_S
        while not self._over.wait(pause_s):
            began = time.perf_counter()
            self._look()
            pause_s = max(SAMPLE_S, (time.perf_counter() - began) / MOST_SHARE)

    def _look(self) -> None:
        self.bytes = max(self.bytes, tree_bytes(self._pid, self._without))

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()  # a short block may have ended before the first sample
