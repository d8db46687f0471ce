"""Random steps for tests of operations: slices of any length over scattered blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvcache.geometry import blocks_for
from worker.ops.table import AttentionShape, BatchInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomStep:
    """One step's inputs, and a pool whose every cell holds something."""

    batch: BatchInputs
    shape: AttentionShape
    block_size: int
    qkv: Tensor
    kv: Tensor
    cos_sin: Tensor

    def widened(self) -> "RandomStep":
        """The same step over a float32 pool."""
        return replace(self, kv=self.kv.float())


def make_batch(
    slices: Sequence[tuple[int, int]],
    *,
    block_size: int,
    num_blocks: int,
    rng: np.random.Generator,
    is_scattered: bool = True,
) -> BatchInputs:
    """Slices as (tokens before, tokens), each with blocks of its own."""
    contexts = np.array([start + count for start, count in slices], dtype=np.int32)
    counts = np.array([count for _, count in slices], dtype=np.int32)
    widest = blocks_for(int(contexts.max()), block_size)
    order = rng.permutation(num_blocks) if is_scattered else np.arange(num_blocks)
    tables = np.full((len(slices), widest), -1, dtype=np.int32)
    taken = 0
    for row, context in enumerate(contexts.tolist()):
        needed = blocks_for(context, block_size)
        tables[row, :needed] = order[taken : taken + needed]
        taken += needed
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    row = np.repeat(np.arange(len(slices)), counts)
    positions = np.concatenate([np.arange(start, start + count) for start, count in slices])
    cells = tables[row, positions // block_size] * block_size + positions % block_size
    return BatchInputs(
        token_ids=torch.from_numpy(rng.integers(0, 50, len(positions))),
        positions=torch.from_numpy(positions.astype(np.int64)),
        cells=torch.from_numpy(cells.astype(np.int64)),
        slice_offsets=torch.from_numpy(offsets),
        block_tables=torch.from_numpy(tables),
        context_lens=torch.from_numpy(contexts),
        max_slice_len=int(counts.max()),
        max_context_len=int(contexts.max()),
    )


def make_step(
    slices: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int] = (6, 3),
    head_dim: int = 16,
    block_size: int = 16,
    kv_dtype: torch.dtype = torch.float32,
    seed: int = 0,
    is_scattered: bool = True,
) -> RandomStep:
    """A step with random activations and a pool just large enough."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    num_blocks = 2 + sum(blocks_for(start + count, block_size) for start, count in slices)
    batch = make_batch(
        slices,
        block_size=block_size,
        num_blocks=num_blocks,
        rng=rng,
        is_scattered=is_scattered,
    )
    num_heads, num_kv_heads = heads
    shape = AttentionShape(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=head_dim**-0.5
    )
    pool = (2, num_blocks, block_size, num_kv_heads, head_dim)
    qkv = torch.randn(batch.num_tokens, shape.qkv_width, generator=generator)
    angles = torch.randn(batch.max_context_len, head_dim // 2, generator=generator)
    return RandomStep(
        batch=batch,
        shape=shape,
        block_size=block_size,
        qkv=qkv,
        kv=torch.randn(pool, generator=generator).to(kv_dtype),
        cos_sin=torch.cat((angles.cos(), angles.sin()), dim=-1),
    )
