"""How near each step comes to what the device allows: bytes moved and FLOP, against the clock.

Drives one rank's `ModelRunner` alone: decode steps at several batch sizes, and a prompt. The
least that a step must move is every weight once and the K/V of its contexts; the least that it
must compute are its products. Activations stay in caches and are not counted. What either takes
at the device's best is the limit; the ratio says how much of it was reached.
"""

import argparse
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.limits import Limits, cpu_limits, gpu_limits
from bench.report import ROOT, header, table
from kvcache.geometry import blocks_for
from scheduler.arrays import int32
from scheduler.plan import Admission, StepPlan
from scheduler.sampling import SamplingParams
from worker.config import RunnerConfig
from worker.models.spec import ModelSpec
from worker.parallel import SingleRank
from worker.runner import ModelRunner

BLOCK_SIZE = 16
TOKEN = 1000
"""What every sequence says: what tokens mean does not matter here."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, seed=0)


@dataclass(frozen=True, slots=True)
class Work:
    """The least that a step moves and computes."""

    bytes_moved: float
    flops: float

    def limit_s(self, limits: Limits) -> float:
        """No device of these limits can be faster."""
        return max(self.bytes_moved / limits.bytes_per_s, self.flops / limits.flops_per_s)

    def bound(self, limits: Limits) -> str:
        """Which of the two it waits for, at its best."""
        moving = self.bytes_moved / limits.bytes_per_s
        return "memory" if moving >= self.flops / limits.flops_per_s else "FLOP"


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one model with one width of weights and of K/V."""

    layer_matrices: int
    """Entries of all layers' matrices."""
    head_matrix: int
    """Entries of the matrix that makes logits."""
    weight_bytes: float
    """Of everything that each step reads."""
    kv_token_bytes: float
    """K and V of one token in all layers."""
    attention_flops: float
    """Of one token against one token of its context, in all layers."""

    def decode(self, batch: int, context: int) -> Work:
        """One token for each of `batch` sequences, each of which then has `context` tokens."""
        return Work(
            self.weight_bytes + batch * context * self.kv_token_bytes,
            batch
            * (2.0 * (self.layer_matrices + self.head_matrix) + context * self.attention_flops),
        )

    def prefill(self, tokens: int) -> Work:
        """A prompt from its start, of which only the last token needs logits."""
        pairs = tokens * (tokens + 1) / 2
        return Work(
            self.weight_bytes + tokens * self.kv_token_bytes,
            2.0 * (tokens * self.layer_matrices + self.head_matrix) + pairs * self.attention_flops,
        )


def costs_of(spec: ModelSpec, weight_bytes: float, width: float, kv_width: float) -> Costs:
    """What follows from a model's shape.

    Args:
        weight_bytes: of all that was loaded.
        width: bytes of a value in the embedding table, of which a step reads a few rows only
            (all, where it is also the output matrix).
        kv_width: bytes of a value in K/V.
    """
    head_dim, hidden = spec.head_dim, spec.hidden_size
    q_columns, kv_columns = spec.num_heads * head_dim, spec.num_kv_heads * head_dim
    layer = hidden * (2 * q_columns + 2 * kv_columns) + 3 * hidden * spec.mlp_columns
    head = spec.vocab_size * hidden
    unread = 0.0 if spec.ties_embeddings else head * width
    return Costs(
        layer_matrices=spec.num_layers * layer,
        head_matrix=head,
        weight_bytes=weight_bytes - unread,
        kv_token_bytes=spec.num_layers * 2 * kv_columns * kv_width,
        attention_flops=spec.num_layers * 4.0 * q_columns,
    )


class Steps:
    """Plans of the simplest kind for one runner: whole prompts, then a token for everyone."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._step = 0
        self._held = 0

    def prefill(self, tokens: int) -> float:
        """Seconds of a step with one prompt."""
        admission = self._admission(0, tokens, 0, int32(range(blocks_for(tokens, BLOCK_SIZE))))
        return self._run(
            released=int32(range(self._held)),
            admitted=(admission,),
            slot=int32([0]),
            start=int32([0]),
            count=int32([tokens]),
            given=int32([tokens]),
            token=int32([TOKEN] * tokens),
            held=1,
        )

    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        """Seconds of each of some steps; contexts end up with `context` tokens.

        Their K/V are not computed first, but lie in the pool already: as a prefix that is found.
        """
        cached = context - steps
        per = blocks_for(context, BLOCK_SIZE)
        admitted = tuple(
            self._admission(i, cached + 1, cached, int32(range(i * per, (i + 1) * per)))
            for i in range(batch)
        )
        return [
            self._run(
                released=int32(range(self._held if step == 0 else 0)),
                admitted=admitted if step == 0 else (),
                slot=int32(range(batch)),
                start=int32([cached + step] * batch),
                count=int32([1] * batch),
                given=int32([1] * batch),
                token=int32([TOKEN] * batch),
                held=batch,
            )
            for step in range(steps)
        ]

    def _admission(self, slot: int, num_prompt: int, cached: int, blocks: object) -> Admission:
        return Admission(
            slot=slot,
            sampling=GREEDY,
            num_prompt=num_prompt,
            blocks=blocks,  # type: ignore[arg-type]  # a column
            num_cached=cached,
        )

    def _run(self, *, held: int, **columns: object) -> float:
        self._step, self._held = self._step + 1, held
        plan = StepPlan(epoch=1, step=self._step, **columns)  # type: ignore[arg-type]  # columns
        started = time.perf_counter()
        self._runner.execute(plan)
        return time.perf_counter() - started


def make_runner(args: argparse.Namespace) -> tuple[ModelRunner, float]:
    """A runner with room for the largest step, and the bytes of its weights."""
    most = max(args.batch)
    num_blocks = most * blocks_for(args.context, BLOCK_SIZE)
    num_blocks = max(num_blocks, blocks_for(args.prompt, BLOCK_SIZE))
    quantized = {} if args.quantization == "none" else {"quantization": args.quantization}
    config = RunnerConfig(
        model_dir=Path(args.model),
        dtype=args.dtype,
        device=args.device,
        block_size=BLOCK_SIZE,
        max_num_seqs=most,
        max_num_batched_tokens=max(args.prompt, most),
        max_model_len=max(args.context, args.prompt),
        num_kv_blocks=num_blocks,
        num_threads=args.threads,
        **quantized,
    )
    runner = ModelRunner(config, SingleRank())
    runner.load()
    capacity = runner.measure()
    runner.allocate(num_blocks)
    return runner, capacity.weight_bytes


def row(what: str, work: Work, seconds: float, limits: Limits, tokens: int) -> list[str]:
    limit = work.limit_s(limits)
    return [
        what,
        f"{work.bytes_moved / 1e6:.0f}",
        f"{work.flops / 1e9:.2f}",
        f"{1e3 * seconds:.2f}",
        f"{tokens / seconds:.0f}",
        f"{work.bytes_moved / seconds / 1e9:.1f}",
        f"{work.flops / seconds / 1e9:.1f}",
        f"{1e3 * limit:.2f} ({work.bound(limits)})",
        f"{limit / seconds:.2f}",
    ]


HEAD = ["", "MB", "GFLOP", "ms", "tokens/s", "GB/s", "GFLOP/s", "limit, ms", "limit / ms"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ROOT / "models" / "smollm2-135m-instruct"))
    parser.add_argument("--dtype", default="auto", help="of weights and K/V")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, default=256, help="tokens of each sequence")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()
    runner, weight_bytes = make_runner(args)
    is_cpu = args.device == "cpu"
    limits = cpu_limits(args.threads) if is_cpu else gpu_limits(runner.dtype)
    costs = costs_of(runner.spec, weight_bytes, runner.dtype.itemsize, runner.dtype.itemsize)
    steps = Steps(runner)
    rows = [HEAD]
    for batch in args.batch:
        spent = steps.decode(batch, args.context, args.steps)[args.steps // 4 :]
        work = costs.decode(batch, args.context)
        rows.append(row(f"decode, {batch}", work, statistics.median(spent), limits, batch))
    spent = [steps.prefill(args.prompt) for _ in range(4)][1:]
    work = costs.prefill(args.prompt)
    rows.append(
        row(f"prompt of {args.prompt}", work, statistics.median(spent), limits, args.prompt)
    )
    print(header())
    print(
        f"\n{Path(args.model).name}, {runner.dtype}, quantization {args.quantization}, contexts "
        f"of {args.context} tokens\n{limits.device}: {limits.bytes_per_s / 1e9:.1f} GB/s, "
        f"{limits.flops_per_s / 1e9:.0f} GFLOP/s ({limits.source})\n"
    )
    print(table(rows))


if __name__ == "__main__":
    main()
