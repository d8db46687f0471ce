"""Builders of steps for the tests of operations: slices over a pool in scattered blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from worker.ops.table import AttentionShape, BatchInputs


def make_shape(num_heads: int = 6, num_kv_heads: int = 2, head_dim: int = 64) -> AttentionShape:
    return AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
    )


@dataclass(frozen=True, slots=True)
class Step:
    """One step and its pool; K/V of all contexts are random already."""

    batch: BatchInputs
    shape: AttentionShape
    kv: Tensor
    q: Tensor

    def only(self, row: int) -> "Step":
        """The slice of one row as the whole of a step, over the same pool."""
        batch = self.batch
        first, end = batch.slice_offsets[row : row + 2].tolist()
        alone = BatchInputs(
            token_ids=batch.token_ids[first:end],
            positions=batch.positions[first:end],
            cells=batch.cells[first:end],
            slice_offsets=torch.tensor([0, end - first], dtype=torch.int32, device=self.q.device),
            block_tables=batch.block_tables[row : row + 1],
            context_lens=batch.context_lens[row : row + 1],
            max_slice_len=end - first,
            max_context_len=int(batch.context_lens[row]),
        )
        return replace(self, batch=alone, q=self.q[first:end])


def make_step(
    slices: Sequence[tuple[int, int]],
    shape: AttentionShape,
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Step:
    """A step of slices (tokens, context length); a context of 0 is a padded row.

    Table entries beyond a context are -1, or ids far outside the pool.
    """
    random = torch.Generator().manual_seed(seed)
    needed = [-(-context // block_size) for _, context in slices]
    num_blocks = sum(needed) + 2
    tables = torch.full((len(slices), max(needed) + 2), -1, dtype=torch.int32)
    tables[:, -1] = 2**30
    order = torch.randperm(num_blocks, generator=random).to(torch.int32)
    positions, cells, offsets = [], [], [0]
    for row, (count, context) in enumerate(slices):
        tables[row, : needed[row]], order = order[: needed[row]], order[needed[row] :]
        position = torch.arange(context - count, context) if context else torch.zeros(count)
        position = position.long()
        block = tables[row, position // block_size].long()
        cell = block * block_size + position % block_size
        positions.append(position)
        cells.append(cell if context else torch.full_like(cell, -1))
        offsets.append(offsets[-1] + count)
    num_tokens = offsets[-1]
    batch = BatchInputs(
        token_ids=torch.randint(0, 100, (num_tokens,), generator=random).to(device),
        positions=torch.cat(positions).to(device),
        cells=torch.cat(cells).to(device),
        slice_offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        context_lens=torch.tensor([c for _, c in slices], dtype=torch.int32, device=device),
        max_slice_len=max(count for count, _ in slices),
        max_context_len=max(context for _, context in slices),
    )
    pool = (2, num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
    kv = torch.randn(pool, generator=random).to(device=device, dtype=dtype)
    q = torch.randn((num_tokens, shape.num_heads, shape.head_dim), generator=random)
    return Step(batch, shape, kv, q.to(device=device, dtype=dtype))
