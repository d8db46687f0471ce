"""What a rank's weights cost when it starts: read for itself, read and lent, or mapped.

Each start is a process of its own, which ends before the next one begins, on a host that keeps
weights (`cluster.weight_keeper`) or does not. Seconds are from when the rank has its code until
its weights are there; memory is what the process holds then, at the most that it ever did.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from bench.report import ROOT, header, table
from cluster.keeper_link import KeeperLink
from cluster.logs import EventLog
from cluster.weight_keeper import WeightKeeper

MIB = 1 << 20
KEY = "bench"
KINDS = ("alone", "lent", "mapped")
"""`alone`: read and packed into memory of its own; `lent`: the same into memory that is kept;
`mapped`: what an earlier one has lent."""


class RankStart(Struct, frozen=True, kw_only=True):
    """One rank, from its code to its weights."""

    kind: str
    weights_s: float
    first_step_s: float
    """The largest step, once, right after: it finds weights in memory or not."""
    peak_bytes: int
    """Most memory that the process had, shared memory included (VmHWM)"""
    own_bytes: int
    """That nobody else has."""
    shared_bytes: int
    """Of the weights, with all that have them mapped"""


def rank_starts(model: Path, rounds: int = 3, *options: str) -> list[RankStart]:
    """`rounds` starts of each of `KINDS`, in turn.

    Args:
        options: of a rank, for example `--quantization=int8`.
    """
    found = []
    for _ in range(rounds):
        keeper = WeightKeeper(KEY, EventLog("bench"))
        try:
            for kind in KINDS:
                name = "" if kind == "alone" else keeper.name
                found.append(_start(kind, name, model, options))
        finally:
            keeper.close()
    return found


def summary(starts: Sequence[RankStart]) -> list[list[str]]:
    """Medians by kind, as rows of a table with its head."""
    rows = [["weights", "s", "first step, s", "peak, MiB", "own, MiB", "shared, MiB"]]
    for kind in KINDS:
        of_kind = [start for start in starts if start.kind == kind]
        rows.append(
            [
                kind,
                f"{statistics.median(start.weights_s for start in of_kind):.3f}",
                f"{statistics.median(start.first_step_s for start in of_kind):.3f}",
                *(
                    f"{statistics.median(getattr(start, name) for start in of_kind) / MIB:.0f}"
                    for name in ("peak_bytes", "own_bytes", "shared_bytes")
                ),
            ]
        )
    return rows


def _start(kind: str, keeper: str, model: Path, options: Sequence[str]) -> RankStart:
    command = [sys.executable, "-m", "bench.rank_start", "--model", str(model), *options]
    done = subprocess.run(
        [*command, "--as-rank", kind, f"--keeper={keeper}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    return msgspec.json.decode(done.stdout, type=RankStart)


def _be_rank(args: argparse.Namespace) -> RankStart:
    from worker.config import RunnerConfig
    from worker.parallel import SingleRank
    from worker.runner import ModelRunner

    model = Path(args.model)
    config = RunnerConfig(
        model_dir=model,
        dtype=args.dtype,
        quantization=args.quantization,
        num_threads=args.threads,
        max_num_batched_tokens=512,
        num_kv_blocks=64,
    )
    keeper = KeeperLink(args.keeper, KEY, model) if args.keeper else None
    runner = ModelRunner(config, SingleRank(), keeper=keeper)
    began = time.perf_counter()
    was_mapped = runner.load()
    loaded = time.perf_counter()
    assert was_mapped == (args.as_rank == "mapped"), args.as_rank
    runner.measure()
    ended = time.perf_counter()
    status = _kib_fields("/proc/self/status")
    own = _kib_fields("/proc/self/smaps_rollup")
    return RankStart(
        kind=args.as_rank,
        weights_s=loaded - began,
        first_step_s=ended - loaded,
        peak_bytes=status["VmHWM"],
        own_bytes=own["Anonymous"],
        shared_bytes=status["RssShmem"],
    )


def _kib_fields(file: str) -> dict[str, int]:
    fields = {}
    for line in Path(file).read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            fields[name] = int(value.split()[0]) * 1024
    return fields


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ROOT / "models" / "smollm2-135m-instruct"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--as-rank", default="", help=argparse.SUPPRESS)
    parser.add_argument("--keeper", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank:
        sys.stdout.buffer.write(msgspec.json.encode(_be_rank(args)))
        return
    options = (
        f"--dtype={args.dtype}",
        f"--quantization={args.quantization}",
        f"--threads={args.threads}",
    )
    print(header())
    print()
    print(table(summary(rank_starts(Path(args.model), args.rounds, *options))))


if __name__ == "__main__":
    main()
