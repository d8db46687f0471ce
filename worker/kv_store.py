"""This shard's K/V tensors. Which block holds what is the business of others."""

import math

import numpy as np
import torch
from torch import Tensor

from kvcache.geometry import KVGeometry
from worker.errors import ModelError

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
        width = geometry.head_bytes // dtype.itemsize
        shape = (2, num_blocks, geometry.block_size, geometry.num_kv_heads, width)
        self.layers: tuple[Tensor, ...] = tuple(
            _zeros(shape, dtype, device) for _ in range(geometry.num_layers)
        )
        """Per layer [2, num_blocks, block_size, num_kv_heads, head width]; K, then V"""


def head_width(head_dim: int, dtype: torch.dtype) -> int:
    """Columns of a pool: int8 values are followed by the float32 to multiply them with."""
    return head_dim + torch.float32.itemsize if dtype == torch.int8 else head_dim


def choose_kv_dtype(wanted: str, dtype: torch.dtype, ops_name: str) -> torch.dtype:
    """How K/V are held; `auto` is as the model's `dtype`.

    Raises:
        ModelError: this set of operations does not read that.
    """
    known = {
        "auto": dtype,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "int8": torch.int8,
    }
    chosen = known[wanted]
    if ops_name == "cuda" and chosen != dtype:
        own = str(dtype).removeprefix("torch.")
        raise ModelError(
            f"kv_cache_dtype={wanted!r}: ops 'cuda' hold K/V in the model's own type, {own}. "
            f"Leave kv_cache_dtype at 'auto', set dtype={wanted!r} if that is a float type, or "
            "use device='cpu'"
        )
    if ops_name == "reference" and chosen == torch.int8:
        raise ModelError(
            "kv_cache_dtype='int8': ops 'reference' read float types only. Use ops='cpu', or "
            "kv_cache_dtype float32, bfloat16 or float16"
        )
    return chosen


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU numpy's zeros, which are pages not taken yet; torch's would write each one."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = np.zeros(num_bytes + ALIGNMENT, dtype=np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return torch.from_numpy(buffer[start : start + num_bytes]).view(dtype).view(shape)
