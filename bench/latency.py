"""From launch to the first token, and one stream at a time: TTFT and the gaps between tokens.

For each backend: how long until the cluster is ready and until a first token is there, then the
requests of a trace one after the other.
"""

import argparse
import statistics
import time

from bench.report import ROOT, header, percentile, table
from bench.traces import Traced, read_trace
from stoker import LLM, SamplingParams
from stoker.bench.peak_memory import PeakMemory


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def measure(backend: str, trace: list[Traced], args: argparse.Namespace) -> dict[str, float]:
    """Figures of one launch."""
    launched = time.perf_counter()
    ttft_s: list[float] = []
    itl_s: list[float] = []
    with PeakMemory() as peak:
        with LLM(
            args.model,
            backend=backend,
            tensor_parallel_size=args.tensor_parallel_size,
            num_threads=max(1, args.cores // args.tensor_parallel_size),
            dtype="float32",
            enable_prefix_caching=False,
            log_level="warning",
        ) as llm:
            ready = time.perf_counter()
            llm.generate([{"prompt_token_ids": [1000, 1001]}], greedy(1), use_tqdm=False)
            first = time.perf_counter()
            for item in trace:
                (output,) = llm.generate(
                    [{"prompt_token_ids": item.prompt_token_ids}],
                    greedy(item.max_tokens),
                    use_tqdm=False,
                )
                assert output.metrics.ttft_s is not None
                ttft_s.append(output.metrics.ttft_s)
                itl_s += output.metrics.itl_s
            closing = time.perf_counter()
        closed = time.perf_counter()
    return {
        "launch to ready, s": ready - launched,
        "launch to first token, s": first - launched,
        "TTFT p50, ms": 1e3 * percentile(ttft_s, 0.5),
        "ITL p50, ms": 1e3 * percentile(itl_s, 0.5),
        "ITL p99, ms": 1e3 * percentile(itl_s, 0.99),
        "decode tokens/s": len(itl_s) / sum(itl_s),
        "peak memory, MiB (PSS)": peak.bytes / 2**20,
        "close, s": closed - closing,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", nargs="?", default="c")
    parser.add_argument("--model", default=str(ROOT / "models" / "smollm2-135m-instruct"))
    parser.add_argument("--backends", nargs="+", default=["local", "ray"])
    parser.add_argument("--tensor-parallel-size", type=int, default=2)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    trace = read_trace(args.trace)
    runs: dict[str, list[dict[str, float]]] = {backend: [] for backend in args.backends}
    for _ in range(args.repeats):
        for backend in args.backends:
            runs[backend].append(measure(backend, trace, args))
    print(header())
    print(
        f"\ntrace {args.trace}, one request at a time; fp32, TP {args.tensor_parallel_size}, "
        f"{args.cores} cores; medians of {args.repeats} launches, the file cache warm\n"
    )
    names = list(runs[args.backends[0]][0])
    rows = [["", *args.backends]]
    for name in names:
        middle = [statistics.median(run[name] for run in runs[b]) for b in args.backends]
        rows.append([name, *(f"{value:.1f}" for value in middle)])
    print(table(rows))


if __name__ == "__main__":
    main()
