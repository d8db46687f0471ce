"""What a test left behind: processes, and files in /dev/shm that are ours.

Other programs run on the same machine, so only descendants of this process count, and only
files in /dev/shm that carry our name. (Ray removes the names of its own as it makes them.)
"""

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
SETTLE_S = 10.0
"""How long a process that was told to end may take to be gone."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What there was at one moment; take one before, and ask it afterwards what is new."""

    processes: frozenset[psutil.Process]
    shared_files: frozenset[str]

    @classmethod
    def now(cls) -> "Footprint":
        return cls(frozenset(_descendants()), frozenset(_shared_files()))

    def leftovers(self) -> list[str]:
        """Describe what is new and still there after time to settle; empty is well."""
        new = [process for process in _descendants() if process not in self.processes]
        _, alive = psutil.wait_procs(new, timeout=SETTLE_S)
        files = sorted(_shared_files() - self.shared_files)
        return [*map(_describe, alive), *(f"{SHARED_MEMORY / name}" for name in files)]


def _descendants() -> list[psutil.Process]:
    """Living descendants, without the one that `multiprocessing` keeps until the end."""
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if (command := _command(process)) and "resource_tracker" not in command
    ]


def _shared_files() -> set[str]:
    if not SHARED_MEMORY.is_dir():
        return set()
    return {name for name in os.listdir(SHARED_MEMORY) if "stoker" in name}


def _command(process: psutil.Process) -> str:
    """The command line; empty for a process that has ended."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def _describe(process: psutil.Process) -> str:
    return f"process {process.pid}: {_command(process)[:200]}"
