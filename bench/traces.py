"""The traces of `bench/workloads`; each request produces exactly `max_tokens` tokens, greedily."""

from pathlib import Path

from bench.report import ROOT
from stoker.bench import trace
from stoker.bench.trace import Traced

WORKLOADS = ROOT / "bench" / "workloads"


def read_trace(name: str) -> list[Traced]:
    """A trace by path, or by the beginning of its name in `bench/workloads`."""
    path = Path(name)
    if not path.exists():
        found = sorted(WORKLOADS.glob(f"{name}*.json"))
        if len(found) != 1:
            names = ", ".join(sorted(p.stem for p in WORKLOADS.glob("*.json")))
            raise SystemExit(f"no trace {name}; there are {names}")
        path = found[0]
    return trace.read_trace(path)
