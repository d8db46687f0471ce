"""`python -m bench.chaos`: many random faults under load, and whether anybody was harmed."""

import argparse
import math
import sys
import tempfile
from pathlib import Path

from bench.chaos.cluster import Served
from bench.chaos.model import make_tiny_model
from bench.chaos.storm import Result, StormConfig, run_storm, table
from cluster.models import resolve_model

NUM_EXAMPLES = 5
"""Of what went wrong, for each kind"""


def options(step_timeout_s: float) -> list[str]:
    """Of the cluster that a storm hits.

    No machine breaks as often as a storm breaks it: a request that is only long is there at death
    after death, as one would be that kills. So nobody is taken for poison, and everybody waits.
    """
    return [
        *("--num-groups", "2", "--tensor-parallel-size", "2"),
        *("--max-restarts", "1000000", "--longest-restart-pause-s", "0.2"),
        *("--max-engine-restarts", "1000000", "--no-workers-s", "3600"),
        *("--poison-after", "0", "--recovery-s", "600"),
        *("--step-timeout-s", f"{step_timeout_s:g}", "--num-kv-blocks", "400"),
        *("--max-model-len", "1024", "--max-num-seqs", "32", "--max-num-batched-tokens", "256"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=math.inf, help="most, for the faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="", help="default: a tiny one, made at run time")
    parser.add_argument("--calls", type=int, default=150, help="different requests")
    parser.add_argument("--but-engine", action="store_true", help="leave the engine core alone")
    parser.add_argument("--kinds", default="", help="only these, separated by commas")
    parser.add_argument("--log", type=Path, default=Path("chaos.log"), help="of the cluster")
    parser.add_argument("--step-timeout", type=float, default=15.0)
    arguments = parser.parse_args()
    config = StormConfig(
        num_faults=arguments.faults,
        lasts_s=60 * arguments.minutes,
        seed=arguments.seed,
        num_calls=arguments.calls,
        with_engine=not arguments.but_engine,
        kinds=frozenset(filter(None, arguments.kinds.split(","))),
        step_timeout_s=arguments.step_timeout,
    )
    with tempfile.TemporaryDirectory(prefix="stoker-tiny-") as folder:
        model = Path(arguments.model) if arguments.model else _tiny(Path(folder))
        with Served(model, arguments.log, options(config.step_timeout_s)) as served:
            result = run_storm(served, config, lambda text: print(text, flush=True))
    report(result, config)
    return 0 if result.is_clean else 1


def _tiny(folder: Path) -> Path:
    return make_tiny_model(folder, resolve_model(None, Path("models"), report=print))


def report(result: Result, config: StormConfig) -> None:
    """The table, and examples of what went wrong."""
    print()
    for name, value in table(result, config):
        print(f"| {name} | {value} |")
    verdict = result.verdict
    for cases in (verdict.dropped, verdict.short, verdict.doubled, verdict.changed):
        for case in cases[:NUM_EXAMPLES]:
            print(f"  {case}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
