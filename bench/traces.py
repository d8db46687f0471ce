"""Request traces: a JSON list of objects with `prompt_token_ids` and `max_tokens`."""

import json
from dataclasses import dataclass
from pathlib import Path

from bench.report import ROOT

WORKLOADS = ROOT / "bench" / "workloads"


@dataclass(frozen=True, slots=True)
class Traced:
    """One request of a trace; it produces exactly `max_tokens` tokens, greedily."""

    prompt_token_ids: list[int]
    max_tokens: int


def read_trace(name: str) -> list[Traced]:
    """A trace by path, or by the beginning of its name in `bench/workloads`."""
    path = Path(name)
    if not path.exists():
        found = sorted(WORKLOADS.glob(f"{name}*.json"))
        if len(found) != 1:
            names = ", ".join(sorted(p.stem for p in WORKLOADS.glob("*.json")))
            raise SystemExit(f"no trace {name}; there are {names}")
        path = found[0]
    return [Traced(**item) for item in json.loads(path.read_text())]
