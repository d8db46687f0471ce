"""Stoker against vLLM, llama.cpp and transformers: same weights, same traces, in turn.

Makes an environment per peer on first use, plays each trace A B A B, and prints the table of
docs/benchmarks.md. What is measured is kept in a file, so that parts can be measured one by one.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from bench.peers import others, page, weights
from bench.peers.bars import BARS, ROWS, STAGES
from bench.peers.catalogue import PEERS, Catalogue
from bench.peers.comparison import Comparison, Limits, held
from bench.peers.record import read_results, write_results
from bench.report import ROOT, commit, header

ONLY = f"rows of the table to measure; all: {', '.join(ROWS)}"
SKIP = f"peers ({', '.join(PEERS)}) or sides (vllm.bf16, ...) to leave out"
LOCK = "hold this file's lock while measuring; may be repeated (for a machine that others use)"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=ROWS, metavar="ROW", help=ONLY)
    parser.add_argument("--skip", nargs="+", default=[], metavar="PEER", help=SKIP)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side on each trace")
    parser.add_argument("--run-limit-s", type=float, default=240.0, help="a run is stopped then")
    parser.add_argument("--start-limit-s", type=float, default=600.0)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--vllm-eager", action="store_true", help="do not let vLLM compile")
    parser.add_argument("--envs", type=Path, default=ROOT / ".peers", help="environments, weights")
    parser.add_argument("--results", type=Path, help="default: results.json under --envs")
    parser.add_argument("--page", type=Path, help="a page whose marked part is written anew")
    parser.add_argument("--lock", type=Path, action="append", default=[], help=LOCK)
    parser.add_argument("--show", action="store_true", help="measure nothing, print what is kept")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that every side is ended
    kept = args.results or args.envs / "results.json"
    results = read_results(kept)
    if not args.show:
        measure(args, kept)
        results = read_results(kept)
    made = page.document(results, [others.scheduler_table(results), others.quality_text(results)])
    print(made)
    if args.page is not None:
        page.write_page(args.page, made)


def measure(args: argparse.Namespace, kept: Path) -> None:
    results = read_results(kept)
    results.machine = header(with_commit=False)
    run_id = time.strftime("%Y-%m-%dT%H:%M:%S")
    catalogue = Catalogue(folder=args.envs, threads=args.threads, eager=args.vllm_eager)
    comparison = Comparison(
        run_id=run_id,
        commit=commit(),
        start=catalogue.start,
        trace_file=lambda name: weights.trace_file(name, args.envs / "weights"),
        limits=Limits(repeats=args.repeats, run_s=args.run_limit_s, start_s=args.start_limit_s),
        results=results,
        save=lambda: write_results(results, kept),
        locks=args.lock,
    )
    bars = tuple(bar for bar in BARS if bar.row in args.only)
    try:
        for stage in STAGES:
            comparison.run_stage(stage, bars, args.skip)
    except BaseException:
        comparison.kill()
        raise
    comparison.close()
    if "scheduler" in args.only:
        with held(args.lock):
            results.parts |= others.measure_schedulers(args.envs, args.threads, run_id, args.skip)
        write_results(results, kept)
    if "quality" in args.only:
        with held(args.lock):
            results.parts |= others.measure_quality(run_id)
        write_results(results, kept)


if __name__ == "__main__":
    main()
