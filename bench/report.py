"""What every measurement prints beside its figures: where, of what, and with which seed."""

import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from stoker import spread
from stoker.bench.machine import machine_line
from stoker.bench.tables import markdown_table

ROOT = Path(__file__).resolve().parent.parent


def commit() -> str:
    """Of the working tree; `-dirty` where it has changes."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return found or "unknown"


def header(seed: int | None = None, *, with_commit: bool = True) -> str:
    """Machine, versions and commit, in one line."""
    parts = [f"torch {version('torch')}"]
    if with_commit:
        parts.append(f"commit {commit()}")
    if seed is not None:
        parts.append(f"seed {seed}")
    return machine_line(*parts)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of the values do not exceed."""
    found = spread.percentile(sorted(values), 100 * share)
    assert found is not None, "there is no percentile of nothing"
    return found


table = markdown_table
