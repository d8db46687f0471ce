"""Pipeline stages against one stage: a trace at once, on the same cores.

One stage computes with all cores; stages have their part of them. Both run in turn (A B A B), each
in a cluster of its own that is up all the time, and medians are printed, with the share of the
time for which each rank computed (its CPU time by its threads' wall time; waiting sleeps), and
what a token costs on the rank that computes most: that bounds the rate, and a busy machine does
not change it much.
"""

import argparse
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

import psutil

from bench.report import ROOT, header, percentile, table
from bench.traces import Traced, read_trace
from stoker import LLM, SamplingParams
from stoker.bench.offline import run_batch

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass(slots=True)
class Side:
    """One way of using the cores, and what its runs gave."""

    pp: int
    tp: int
    num_threads: int
    llm: LLM
    seconds: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    busy: list[list[float]] = field(default_factory=list)
    """By run, the share of the time of each rank, stage after stage."""
    core_s: list[float] = field(default_factory=list)
    """By run, what each core of the rank that computed most has computed."""

    @property
    def name(self) -> str:
        return f"PP {self.pp} × TP {self.tp}, {self.num_threads} threads each"

    def run(self, trace: list[Traced]) -> None:
        ranks = [psutil.Process(rank.pid) for rank in self.llm.client.status().groups[0].ranks]
        before = [_cpu_s(rank) for rank in ranks]
        began = time.perf_counter()
        batch = run_batch(self.llm.client, [item.as_call for item in trace], GREEDY)
        wall_s = time.perf_counter() - began
        made = [len(output.outputs[0].token_ids) for output in batch.outputs]
        assert made == [item.max_tokens for item in trace], "a request ended early"
        self.seconds.append(batch.wall_s)
        self.ttft_s += [o.metrics.ttft_s for o in batch.outputs if o.metrics.ttft_s is not None]
        self.itl_s += [gap for output in batch.outputs for gap in output.metrics.itl_s]
        self.steps.append(batch.after.totals.num_steps - batch.before.totals.num_steps)
        spent = [_cpu_s(rank) - start for rank, start in zip(ranks, before, strict=True)]
        self.busy.append([one / wall_s / self.num_threads for one in spent])
        self.core_s.append(max(spent) / self.num_threads)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", nargs="?", default="a", help="as for bench.throughput")
    parser.add_argument("--requests", type=int, help="only so many of the trace")
    parser.add_argument("--model", default=str(ROOT / "models" / "smollm2-135m-instruct"))
    parser.add_argument("--shapes", nargs="+", default=["1x1", "2x1"], help="PPxTP of each side")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    trace = read_trace(args.trace)[: args.requests]
    with ExitStack() as clusters:
        sides = []
        for shape in args.shapes:
            pp, tp = map(int, shape.split("x"))
            threads = max(1, args.cores // (pp * tp))
            llm = LLM(
                args.model,
                pipeline_parallel_size=pp,
                tensor_parallel_size=tp,
                num_threads=threads,
                backend="local",
                dtype="float32",
                enable_prefix_caching=False,
                num_kv_blocks=2048,
                max_model_len=2048,
                log_level="warning",
            )
            clusters.enter_context(llm)
            sides.append(Side(pp, tp, threads, llm))
            run_batch(llm.client, [item.as_call for item in trace[:2]], GREEDY)
        for _ in range(args.repeats):
            for side in sides:
                side.run(trace)
    report(trace, sides, args)


def report(trace: list[Traced], sides: list[Side], args: argparse.Namespace) -> None:
    made = sum(item.max_tokens for item in trace)
    print(header())
    print(
        f"\ntrace {args.trace}: {len(trace)} requests, "
        f"{sum(len(item.prompt_token_ids) for item in trace)} prompt and {made} output tokens; "
        f"fp32, greedy, {args.cores} cores, {args.repeats} runs each in turn, medians\n"
    )
    costs = [1e3 * statistics.median(side.core_s) / made for side in sides]
    rates = [made / statistics.median(side.seconds) for side in sides]
    rows = [
        ["", *(side.name for side in sides)],
        ["output tokens/s", *(f"{rate:.1f}" for rate in rates)],
        ["ratio", *(f"{rate / rates[0]:.2f}" for rate in rates)],
        ["TTFT p50, ms", *(f"{1e3 * percentile(side.ttft_s, 0.5):.1f}" for side in sides)],
        ["ITL p50, ms", *(f"{1e3 * percentile(side.itl_s, 0.5):.1f}" for side in sides)],
        ["ITL p99, ms", *(f"{1e3 * percentile(side.itl_s, 0.99):.1f}" for side in sides)],
        ["steps", *(f"{statistics.median(side.steps):.0f}" for side in sides)],
        ["ranks busy, %", *(_busy_of(side) for side in sides)],
        ["ms of the busiest core per token", *(f"{cost:.2f}" for cost in costs)],
        ["ratio that this allows", *(f"{costs[0] / cost:.2f}" for cost in costs)],
    ]
    print(table(rows))


def _busy_of(side: Side) -> str:
    by_rank = zip(*side.busy, strict=True)
    return ", ".join(f"{100 * statistics.median(shares):.0f}" for shares in by_rank)


if __name__ == "__main__":
    main()
