"""Sizes of the attention kernels' tiles, by dtype and head size, the same for every batch.

Chosen to fit 99 KiB of shared memory, what a program may have on the smallest GPUs in use
(compute capability 8.6, 8.9 and 12.0); 8.0, 9.0 and 10.0 have more. The result of a row of
the scores depends on the number of keys per tile, so sizes must not follow the batch.
"""

import math
from dataclasses import dataclass

import torch

from worker.ops.table import AttentionShape

LOG2_E = math.log2(math.e)
_LEAST_ROWS = 16
"""Of a matrix product on tensor cores (`tl.dot`)."""


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """Of the decode kernel: the query heads of one K/V head, padded, times keys."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """Of the prefill kernel: tokens times the query heads of one K/V head, times keys."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int

    def tokens(self, group: int) -> int:
        """Query tokens of a tile; each takes a row per query head of its K/V head."""
        return self.rows // group


def decode_tiles(dtype: torch.dtype, shape: AttentionShape) -> DecodeTiles:
    queries = max(_LEAST_ROWS, _power_of_two(shape.num_heads // shape.num_kv_heads))
    keys = 64 if shape.head_dim <= 128 else 32
    if dtype == torch.float32:
        keys //= 2
    return DecodeTiles(queries, keys, num_warps=4 if queries < 64 else 8, num_stages=2)


def prefill_tiles(dtype: torch.dtype, shape: AttentionShape) -> PrefillTiles:
    least = max(_LEAST_ROWS, _power_of_two(shape.num_heads // shape.num_kv_heads))
    keys = 64 if shape.head_dim <= 128 else 32
    if dtype == torch.float32:
        return PrefillTiles(max(least, 32), keys // 2, num_warps=8, num_stages=1)
    rows = 128 if shape.head_dim <= 128 else 64
    return PrefillTiles(max(least, rows), keys, num_warps=8, num_stages=2)


def _power_of_two(number: int) -> int:
    """The least power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()
