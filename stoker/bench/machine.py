"""Where something was measured, in one line: figures without it mean little."""

import os
import platform
from importlib.metadata import version
from pathlib import Path


def machine_line(*extra: str) -> str:
    """Processor, cores, how busy they were, versions, and whatever else is given."""
    parts = [
        f"{_processor()}, {_cores()} cores",
        f"load {os.getloadavg()[0]:.1f}",
        f"Python {platform.python_version()}",
        f"stoker {version('stoker')}",
        *extra,
    ]
    return " · ".join(parts)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0))
