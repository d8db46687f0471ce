"""Attention of the native CPU set alone: how fast decodes read K/V, and how fast prompts compute.

Decodes are counted in bytes of K/V, prompts in floating-point operations of the half that is not
masked. Beside them torch's scaled_dot_product_attention over dense float32 K/V, which needs no
blocks to be looked up, at the same shape.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.report import header, table
from kvcache.geometry import KVGeometry
from worker.kv_store import KVStore, head_width
from worker.ops.cpu import CpuOperations
from worker.ops.table import AttentionShape, BatchInputs
from worker.window import NO_WINDOW

FORMATS = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
BLOCK_SIZE = 16


def make_batch(num_slices: int, context: int, tokens: int) -> BatchInputs:
    """The last `tokens` of contexts of the same length, over scattered blocks."""
    blocks = -(-context // BLOCK_SIZE)
    tables = torch.randperm(num_slices * blocks).int().view(num_slices, blocks)
    positions = torch.arange(context - tokens, context).repeat(num_slices)
    return BatchInputs(
        token_ids=torch.zeros(num_slices * tokens).long(),
        positions=positions,
        cells=torch.zeros_like(positions),
        slice_offsets=torch.arange(num_slices + 1).int() * tokens,
        block_tables=tables,
        context_lens=torch.full((num_slices,), context).int(),
        max_slice_len=tokens,
        max_context_len=context,
    )


def make_layers(shape: AttentionShape, num_blocks: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """A pool whose every cell holds something."""
    geometry = KVGeometry(
        num_layers=4,
        num_kv_heads=shape.num_kv_heads,
        head_bytes=head_width(shape.head_dim, dtype) * dtype.itemsize,
        block_size=BLOCK_SIZE,
    )
    layers = KVStore(geometry, num_blocks, dtype, torch.device("cpu")).layers
    for kv in layers:
        kv[..., : shape.head_dim] = torch.randn(kv[..., : shape.head_dim].shape).clamp(-2, 2)
        if dtype == torch.int8:
            kv[..., shape.head_dim :] = torch.tensor([0.5]).view(torch.int8)
    return layers


def seconds(work: Callable[[], object], pools: int, least_s: float) -> float:
    """Median over enough calls; `pools` calls count as one."""
    work()
    taken: list[float] = []
    while sum(taken) < least_s or len(taken) < 5:
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) / pools


def measure(
    ops: CpuOperations,
    shape: AttentionShape,
    batch: BatchInputs,
    dtype: torch.dtype,
    least_s: float,
) -> float:
    """Seconds per layer; layers take turns, as a model's do, so that caches help no more."""
    layers = make_layers(shape, batch.block_tables.numel(), dtype)
    q = torch.randn(batch.num_tokens, shape.num_heads, shape.head_dim)
    ops.begin_step(batch, shape, BLOCK_SIZE)

    def work() -> None:
        for kv in layers:
            ops.paged_attention(q, kv, batch, shape, NO_WINDOW)

    return seconds(work, len(layers), least_s)


def measure_torch(shape: AttentionShape, batch: BatchInputs, least_s: float) -> float:
    num, context, tokens = batch.num_slices, batch.max_context_len, batch.max_slice_len
    q = torch.randn(num, shape.num_heads, tokens, shape.head_dim)
    layers = [torch.randn(2, num, shape.num_kv_heads, context, shape.head_dim) for _ in range(4)]

    def work() -> None:
        for k, v in layers:
            F.scaled_dot_product_attention(q, k, v, is_causal=tokens > 1, enable_gqa=True)

    return seconds(work, len(layers), least_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--heads",
        type=int,
        nargs=3,
        default=(9, 3, 64),
        metavar="N",
        help="query heads, K/V heads, dimensions of a head (default: 9 3 64)",
    )
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--least-s", type=float, default=1.0, help="per figure")
    parser.add_argument("--level", help="of instruction sets (default: the best)")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    num_heads, num_kv_heads, head_dim = args.heads
    shape = AttentionShape(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=head_dim**-0.5
    )
    ops = CpuOperations(args.threads, args.level)
    decode = make_batch(args.sequences, args.context, 1)
    prompt = make_batch(1, args.prompt, args.prompt)
    num_keys = args.sequences * args.context
    pairs = args.prompt * (args.prompt + 1) / 2
    flops = 4 * pairs * num_heads * head_dim
    with torch.inference_mode():
        torch_decode = measure_torch(shape, decode, args.least_s)
        torch_prompt = measure_torch(shape, prompt, args.least_s)
        rows = []
        for dtype in FORMATS:
            head_bytes = head_width(head_dim, dtype) * dtype.itemsize
            num_bytes = 2 * num_keys * num_kv_heads * head_bytes
            decode_s = measure(ops, shape, decode, dtype, args.least_s)
            prompt_s = measure(ops, shape, prompt, dtype, args.least_s)
            rows.append(
                (
                    str(dtype).removeprefix("torch."),
                    f"{num_bytes / decode_s / 1e9:.1f}",
                    f"{torch_decode / decode_s:.2f}x",
                    f"{flops / prompt_s / 1e9:.0f}",
                    f"{torch_prompt / prompt_s:.2f}x",
                )
            )
    print(header(0))
    print(
        f"{args.threads} threads, level {ops.team.level}; {num_heads} query heads, {num_kv_heads} "
        f"K/V heads of {head_dim}; decode {args.sequences} x {args.context}, prompt {args.prompt}"
    )
    columns = ("K/V", "decode GB/s", "of torch's", "prompt GFLOP/s", "of torch's")
    print(table([columns, *rows]))


if __name__ == "__main__":
    main()
