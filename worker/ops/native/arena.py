"""Memory in large pages, for what is read from end to end in every step.

A step reads all weights. In pages of 4 KiB that is a page table walk every 64 cache lines, at
which prefetchers stop as well; in pages of 2 MiB they read on.
"""

import contextlib
import mmap
from typing import Protocol

import torch
from torch import Tensor

_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 128


class Memory(Protocol):
    """What weights are packed into: an `Arena`, or a `worker.weight_memory.SharedArena`."""

    def room(self, num_bytes: int) -> Tensor:
        """Bytes (uint8) to pack into, at the start of two cache lines. Anything is in them."""
        ...

    def settle(self, packed: Tensor) -> Tensor:
        """Where a filled `room` is from now on; its bytes may be used for the next one."""
        ...


class Arena:
    """Hands out memory, which is given back when nothing of the same chunk is used any more."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def room(self, num_bytes: int) -> Tensor:
        if self._used + num_bytes > self._chunk.shape[0]:
            self._chunk = in_large_pages(max(num_bytes, _CHUNK_BYTES))
            self._used = 0
        start = self._used
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return self._chunk[start : start + num_bytes]

    def settle(self, packed: Tensor) -> Tensor:
        """It stays."""
        return packed


def in_large_pages(num_bytes: int) -> Tensor:
    """Anonymous memory, of which what is never touched costs nothing."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without large pages gives small ones
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
