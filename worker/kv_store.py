"""This shard's K/V tensors. Which block holds what is the business of others."""

import math

import numpy as np
import torch
from torch import Tensor

from kvcache.geometry import KVGeometry

ALIGNMENT = 64
"""Bytes, as torch aligns its own tensors: matrix products of the same numbers may round
differently at another alignment, and gathered blocks must give what blocks in place do."""


class KVStore:
    """K/V of one rank for `num_blocks` blocks, one tensor per layer.

    They start as zeros, not as whatever memory holds: attention multiplies what it does not
    see by 0, and 0 times NaN is NaN. On a CPU pages are taken only as they are written.
    """

    def __init__(
        self, geometry: KVGeometry, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.geometry, self.num_blocks = geometry, num_blocks
        shape = (2, num_blocks, geometry.block_size, geometry.num_kv_heads, geometry.head_dim)
        self.layers: tuple[Tensor, ...] = tuple(
            _zeros(shape, dtype, device) for _ in range(geometry.num_layers)
        )
        """Per layer [2, num_blocks, block_size, num_kv_heads, head_dim]; K, then V"""


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU numpy's zeros, which are pages not taken yet; torch's would write each one."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = np.zeros(num_bytes + ALIGNMENT, dtype=np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return torch.from_numpy(buffer[start : start + num_bytes]).view(dtype).view(shape)
