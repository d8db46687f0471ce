"""What every measurement prints beside its figures: where, of what, and with which seed."""

import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def header(seed: int | None = None) -> str:
    """Machine, versions and commit, in one line."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    parts = [
        f"{_processor()}, {_cores()} cores",
        f"Python {platform.python_version()}",
        f"torch {version('torch')}",
        f"commit {commit or 'unknown'}",
    ]
    if seed is not None:
        parts.append(f"seed {seed}")
    return " · ".join(parts)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _cores() -> int:
    return sum(
        line.startswith("processor") for line in Path("/proc/cpuinfo").read_text().splitlines()
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of the values do not exceed."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, max(0, -(-int(share * 1000) * len(ranked) // 1000) - 1))]


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is the head, the first column is aligned left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| "
        + " | ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in rows
    ]
    rule = ["-" * width if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    lines.insert(1, "| " + " | ".join(rule) + " |")
    return "\n".join(lines)
