"""A whole trace at once: output tokens per second, TTFT, ITL, memory and start-up time.

Runs Stoker and, unless `--no-peer`, transformers on the same trace in turn (A B A B), with
the same weights in fp32 and the same number of cores, and prints ratios of medians. A peer
that takes `--patience` times as long as Stoker is stopped: its rate is then below what is
printed, and the ratio above.
"""

import argparse
import json
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from bench.report import ROOT, header, percentile, table
from bench.traces import Traced, read_trace
from stoker import LLM, SamplingParams
from stoker.bench.offline import run_batch
from stoker.bench.peak_memory import PeakMemory

PATIENCE = "stop transformers after this many times Stoker's time"


@dataclass(slots=True)
class Figures:
    """What the runs of one side gave."""

    seconds: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    decode_rate: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    start_s: float = 0.0
    was_stopped: bool = False
    """Its last run had not ended when its time was up."""


class Peer:
    """transformers in a process of its own, which computes only when told to."""

    def __init__(self, trace: str, model: str, threads: int) -> None:
        started = time.perf_counter()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "bench.transformers_peer", trace),
                *("--model", model, "--threads", str(threads)),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer()  # that it is ready
        self.figures = Figures(start_s=time.perf_counter() - started)

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, num_requests: int, limit_s: float) -> None:
        """Answer the trace once more, or as much of it as `limit_s` allows."""
        assert self._process.stdin is not None
        self._process.stdin.write("run\n")
        self._process.stdin.flush()
        figures = self.figures
        with PeakMemory(self._process.pid) as peak:
            if not select.select([self._process.stdout], [], [], limit_s)[0]:
                self._process.kill()
                figures.was_stopped = True
                answer = {"seconds": limit_s}
            else:
                answer = self._answer()
        figures.seconds.append(answer["seconds"])
        if "ttft_s" in answer:
            figures.ttft_s.append(answer["ttft_s"])
            after_first = answer["output_tokens"] - num_requests
            figures.decode_rate.append(after_first / (answer["seconds"] - answer["ttft_s"]))
        figures.peak_bytes = max(figures.peak_bytes, peak.bytes)

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("transformers ended; run bench.transformers_peer to see why")
        answer: dict[str, float] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def run_ours(llm: LLM, trace: list[Traced], figures: Figures, without: int | None = None) -> None:
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    batch = run_batch(llm.client, [item.as_call for item in trace], greedy, without_pid=without)
    made = [len(output.outputs[0].token_ids) for output in batch.outputs]
    assert made == [item.max_tokens for item in trace], "a request ended early"
    figures.seconds.append(batch.wall_s)
    ttfts = [output.metrics.ttft_s for output in batch.outputs]
    figures.ttft_s += [ttft for ttft in ttfts if ttft is not None]
    itls = [gap for output in batch.outputs for gap in output.metrics.itl_s]
    figures.itl_s += itls
    if len(trace) == 1:
        figures.decode_rate.append(len(itls) / sum(itls))
    figures.peak_bytes = max(figures.peak_bytes, batch.peak_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", help="a file, or the beginning of a name in bench/workloads")
    parser.add_argument("--model", default=str(ROOT / "models" / "smollm2-135m-instruct"))
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--backend", choices=("local", "ray"), default="local")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true", help="measure Stoker alone")
    parser.add_argument("--patience", type=float, default=3.0, help=PATIENCE)
    args = parser.parse_args()
    trace = read_trace(args.trace)
    started = time.perf_counter()
    ours = Figures()
    with LLM(
        args.model,
        tensor_parallel_size=args.tensor_parallel_size,
        backend=args.backend,
        num_threads=max(1, args.cores // args.tensor_parallel_size),
        dtype="float32",
        enable_prefix_caching=False,
        log_level="warning",
    ) as llm:
        ours.start_s = time.perf_counter() - started
        run_ours(llm, trace[:2], Figures())
        peer = None if args.no_peer else Peer(args.trace, args.model, args.cores)
        for _ in range(args.repeats):
            run_ours(llm, trace, ours, None if peer is None else peer.pid)
            if peer is not None and not peer.figures.was_stopped:
                peer.run(len(trace), args.patience * ours.seconds[-1])
        if peer is not None:
            peer.close()
    report(trace, ours, None if peer is None else peer.figures, args)


def report(
    trace: list[Traced], ours: Figures, theirs: Figures | None, args: argparse.Namespace
) -> None:
    made = sum(item.max_tokens for item in trace)
    print(header())
    print(
        f"\ntrace {args.trace}: {len(trace)} requests, "
        f"{sum(len(item.prompt_token_ids) for item in trace)} prompt and {made} output tokens; "
        f"fp32, greedy, {args.cores} cores, TP {args.tensor_parallel_size}, {args.backend}, "
        f"{args.repeats} runs each in turn, medians\n"
    )
    print(
        table(
            [
                ["", "Stoker", *(["transformers", "ratio"] if theirs else [])],
                *rows(made, ours, theirs),
            ]
        )
    )
    if theirs is not None and theirs.was_stopped:
        print(
            f"\ntransformers was stopped after {theirs.seconds[-1]:.0f} s: it is slower than that"
        )


Pair: TypeAlias = tuple[float | None, float | None]
"""Stoker's figure and the peer's."""


def both(figure: Callable[[Figures], float | None], ours: Figures, theirs: Figures | None) -> Pair:
    return figure(ours), None if theirs is None else figure(theirs)


def rows(made: int, ours: Figures, theirs: Figures | None) -> list[list[str]]:
    def row(name: str, pair: Pair, digits: int = 1) -> list[str]:
        mine, other = pair
        cells = [name, *("–" if side is None else f"{side:.{digits}f}" for side in pair)]
        cells.append(f"{mine / other:.2f}" if mine and other else "–")
        return cells if theirs is not None else cells[:2]

    def decode_rate(side: Figures) -> float | None:
        return statistics.median(side.decode_rate) if side.decode_rate else None

    def ttft(side: Figures) -> float | None:
        return 1e3 * percentile(side.ttft_s, 0.5) if side.ttft_s else None

    itl = ours.itl_s or [0.0]
    return [
        row("output tokens/s", both(lambda s: made / statistics.median(s.seconds), ours, theirs)),
        row("decode tokens/s after the first", both(decode_rate, ours, theirs)),
        row("TTFT p50, ms", both(ttft, ours, theirs)),
        row("TTFT p95, ms", (1e3 * percentile(ours.ttft_s, 0.95), None)),
        row("ITL p50, ms", (1e3 * percentile(itl, 0.5), None)),
        row("ITL p99, ms", (1e3 * percentile(itl, 0.99), None)),
        row("peak memory, MiB (PSS)", both(lambda s: s.peak_bytes / 2**20, ours, theirs), 0),
        row("launch to ready, s", both(lambda s: s.start_s, ours, theirs)),
    ]


if __name__ == "__main__":
    main()
