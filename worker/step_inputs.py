"""A step's inputs beyond the plan: those of the largest one, and any of them on a device."""

import numpy as np
import torch
from torch import Tensor

from kvcache.geometry import blocks_for
from worker.host_copy import to_device
from worker.ops.table import BatchInputs


def largest_batch(
    longest: int, num_slices: int, block_size: int, max_context_len: int
) -> BatchInputs:
    """One slice of `longest` tokens and decodes, all of them in the same blocks, in buffers that
    would do for contexts up to `max_context_len`."""
    counts = np.ones(num_slices, dtype=np.int32)
    counts[0] = longest
    offsets = np.zeros(num_slices + 1, dtype=np.int32)
    np.cumsum(counts, out=offsets[1:])
    positions = np.arange(int(offsets[-1]), dtype=np.int64)
    positions[longest:] = 0
    blocks = np.arange(blocks_for(longest, block_size), dtype=np.int32)
    return BatchInputs(
        token_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.from_numpy(positions),
        cells=torch.from_numpy(positions.copy()),
        slice_offsets=torch.from_numpy(offsets),
        block_tables=torch.from_numpy(np.tile(blocks, (num_slices, 1))),
        context_lens=torch.from_numpy(counts),
        max_slice_len=longest,
        max_context_len=max_context_len,
    )


def batch_on_device(batch: BatchInputs, device: torch.device) -> BatchInputs:
    """Every tensor of it; nothing waits."""
    if device.type == "cpu":
        return batch

    def moved(tensor: Tensor) -> Tensor:
        return to_device(tensor, device)

    return BatchInputs(
        token_ids=moved(batch.token_ids),
        positions=moved(batch.positions),
        cells=moved(batch.cells),
        slice_offsets=moved(batch.slice_offsets),
        block_tables=moved(batch.block_tables),
        context_lens=moved(batch.context_lens),
        max_slice_len=batch.max_slice_len,
        max_context_len=batch.max_context_len,
    )
