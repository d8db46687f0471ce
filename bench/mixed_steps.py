"""What mixing prompts and streams in one step gains over exclusive phases.

The same load under both: streams run while prompts of many lengths arrive. Exclusive phases
(a step holds prompts or streams, never both, prompts first, as early continuous-batching
engines did) make every stream wait for every prompt; mixed steps do not. Writes a table and a
plot.
"""

import argparse
import itertools
import random
import statistics
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from bench.report import ROOT, header, percentile, table
from stoker import LLM, SamplingParams
from stoker.client import Client, Handle

MODES = {"mixed": False, "exclusive": True}


@dataclass(frozen=True, slots=True)
class Load:
    """Streams that run all the time, and prompts that arrive meanwhile."""

    num_streams: int
    stream_tokens: int
    arrivals: list[tuple[float, list[int]]]
    """Seconds after the streams run, and the prompt."""
    answer_tokens: int


@dataclass(slots=True)
class Figures:
    """Of one mode."""

    itl_s: list[float] = field(default_factory=list)
    """Of the streams, while prompts arrive."""
    ttft_s: list[float] = field(default_factory=list)
    """Of the arriving prompts."""
    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    mixed_steps: int = 0


def make_load(args: argparse.Namespace) -> Load:
    """Lengths drawn evenly on a logarithmic scale, arrivals a Poisson process."""
    rng = random.Random(args.seed)
    at = 0.0
    arrivals = []
    for _ in range(args.prompts):
        at += rng.expovariate(args.rate)
        length = round(args.shortest * (args.longest / args.shortest) ** rng.random())
        arrivals.append((at, [rng.randrange(1000, 31000) for _ in range(length)]))
    return Load(args.streams, args.stream_tokens, arrivals, args.answer_tokens)


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def arrive(client: Client, load: Load, started: float) -> list[Handle]:
    handles = []
    for at, prompt in load.arrivals:
        time.sleep(max(0.0, started + at - time.perf_counter()))
        handles.append(client.submit({"prompt_token_ids": prompt}, greedy(load.answer_tokens)))
    return handles


class StreamWatch:
    """Notes when each token of a stream came."""

    def __init__(self, handle: Handle) -> None:
        self.times: list[float] = []
        self._handle = handle
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for piece in self._handle:
            self.times += [time.perf_counter()] * len(piece.token_ids)

    def stop(self) -> None:
        self._handle.cancel()
        self._thread.join()


def run(mode: str, load: Load, args: argparse.Namespace) -> Figures:
    figures = Figures()
    with LLM(
        args.model,
        tensor_parallel_size=args.tensor_parallel_size,
        backend=args.backend,
        max_num_batched_tokens=args.budget,
        max_num_seqs=64,
        num_kv_blocks=args.num_kv_blocks,
        exclusive_phases=MODES[mode],
        enable_prefix_caching=False,
        dtype="float32",
        log_level="warning",
    ) as llm:
        client = llm.client
        rng = random.Random(args.seed + 1)
        watches = [
            StreamWatch(
                client.submit(
                    {"prompt_token_ids": [rng.randrange(1000, 31000) for _ in range(16)]},
                    greedy(load.stream_tokens),
                )
            )
            for _ in range(load.num_streams)
        ]
        while min(len(watch.times) for watch in watches) < 5:
            time.sleep(0.01)
        before, started = client.status(), time.perf_counter()
        answers = [handle.result() for handle in arrive(client, load, started)]
        ended, after = time.perf_counter(), client.status()
        for watch in watches:
            watch.stop()
    for watch in watches:
        during = [moment for moment in watch.times if started <= moment <= ended]
        figures.itl_s += [b - a for a, b in itertools.pairwise(during)]
        figures.tokens += len(during)
    figures.tokens += sum(len(answer.outputs[0].token_ids) for answer in answers)
    figures.ttft_s = [a.metrics.ttft_s for a in answers if a.metrics.ttft_s is not None]
    figures.seconds = ended - started
    figures.steps = after.totals.num_steps - before.totals.num_steps
    figures.mixed_steps = after.totals.num_mixed_steps - before.totals.num_mixed_steps
    return figures


def compare(results: dict[str, list[Figures]]) -> str:
    def middle(mode: str, name: str) -> float:
        def figure(run: Figures) -> float:
            match name:
                case "output tokens/s":
                    return run.tokens / run.seconds
                case "mixed steps, %":
                    return 100.0 * run.mixed_steps / run.steps
                case "steps":
                    return run.steps
                case _:
                    kind, share = name.split()[:2]
                    values = run.ttft_s if kind == "TTFT" else run.itl_s
                    return 1e3 * percentile(values, float(share.strip("p,")) / 100)

        return statistics.median(figure(run) for run in results[mode])

    names = ["output tokens/s"]
    names += [f"{kind} p{share}, ms" for kind in ("TTFT", "ITL") for share in (50, 99)]
    names += ["mixed steps, %", "steps"]
    rows = [["", "mixed", "exclusive phases", "ratio"]]
    for name in names:
        mixed, exclusive = middle("mixed", name), middle("exclusive", name)
        ratio = f"{mixed / exclusive:.2f}" if exclusive else "–"
        rows.append([name, f"{mixed:.1f}", f"{exclusive:.1f}", ratio])
    return table(rows)


def plot(results: dict[str, list[Figures]], path: Path) -> None:
    """Cumulative shares of the streams' gaps and of the prompts' first-token times."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    for axis, name, title in (
        (axes[0], "itl_s", "gap between tokens of running streams"),
        (axes[1], "ttft_s", "time to first token of arriving prompts"),
    ):
        for mode, runs in results.items():
            values = sorted(1e3 * value for run in runs for value in getattr(run, name))
            shares = [(i + 1) / len(values) for i in range(len(values))]
            axis.step(values, shares, where="post", label=f"{mode} steps")
        axis.set(title=title, xlabel="ms", ylabel="share", xscale="log", ylim=(0, 1))
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ROOT / "models" / "smollm2-135m-instruct"))
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--backend", choices=("local", "ray"), default="local")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--stream-tokens", type=int, default=4000)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--rate", type=float, default=0.35, help="prompts per second")
    parser.add_argument("--shortest", type=int, default=100)
    parser.add_argument("--longest", type=int, default=4000)
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--budget", type=int, default=128, help="max_num_batched_tokens")
    parser.add_argument("--num-kv-blocks", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "mixed_steps.png")
    args = parser.parse_args()
    load = make_load(args)
    results: dict[str, list[Figures]] = {mode: [] for mode in MODES}
    for _ in range(args.repeats):
        for mode in MODES:
            results[mode].append(run(mode, load, args))
    lengths = sorted(len(prompt) for _, prompt in load.arrivals)
    print(header(args.seed))
    print(
        f"\n{args.streams} streams while {len(lengths)} prompts of {lengths[0]} to {lengths[-1]} "
        f"tokens (median {statistics.median(lengths):.0f}) arrive at {args.rate} per second; "
        f"budget {args.budget} tokens per step, {args.num_kv_blocks} KV blocks of 16, fp32, "
        f"TP {args.tensor_parallel_size}; medians of {args.repeats} runs in turn\n"
    )
    print(compare(results))
    plot(results, args.plot)
    print(f"\nplot: {args.plot}")


if __name__ == "__main__":
    main()
