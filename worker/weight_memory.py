"""One rank's weights in memory that other ranks of its host may map: filled once, then sealed.

The memory has no name (`memfd_create(2)`): it goes with the last process that holds it, however
that ends. While it is filled nobody else knows of it. When it is whole it is sealed, so that
neither the filler nor anybody who gets the descriptor can change or shorten it.

A sealed memory ends with a form, which says what lies where, and the form's length.
"""

import ctypes
import fcntl
import mmap
import os
import struct
from functools import cache

import torch
from torch import Tensor

from worker.errors import UnfitWeights
from worker.kept_weights import SEALS, is_sealed
from worker.ops.native.arena import in_large_pages

MOST_ROOM_BYTES = 32 << 20
"""Of memory to pack into that is used again; larger weights are packed in memory of their own."""

_ALIGNMENT = 128
_LENGTH = struct.Struct("<Q")
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000


class SharedArena:
    """Takes tensors in, all of them behind one descriptor; packed weights too, as a
    `worker.ops.native.arena.Memory`.

    What is taken in is written through the descriptor, which on Linux costs less than half of
    what writing through a mapping does, and read through a mapping that never could be written.
    """

    def __init__(self, max_bytes: int) -> None:
        """Take addresses; memory is taken as it is filled.

        Args:
            max_bytes: that may be filled. More costs nothing but addresses.

        Raises:
            OSError: the system does not let this process have so large a file.
        """
        self._num_bytes = _rounded(max_bytes, mmap.PAGESIZE)
        self._used = 0
        self._room = torch.empty(0, dtype=torch.uint8)
        self._fd = os.memfd_create("stoker-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, self._num_bytes)
            self.memory = _mapped(self._fd, self._num_bytes)
        except BaseException:
            os.close(self._fd)
            raise

    def room(self, num_bytes: int) -> Tensor:
        """Bytes (uint8) to pack into; the next call may return the same ones."""
        if num_bytes > MOST_ROOM_BYTES:
            return in_large_pages(num_bytes)
        if not self._room.nbytes:
            self._room = in_large_pages(MOST_ROOM_BYTES)
        return self._room[:num_bytes]

    def settle(self, packed: Tensor) -> Tensor:
        return self.keep(packed)

    def keep(self, tensor: Tensor) -> Tensor:
        """The same in here, at the start of two cache lines, to be read only.

        Raises:
            OSError: there is no memory.
            ValueError: it is more than was expected.
        """
        start, self._used = self._used, self._used + _rounded(tensor.nbytes, _ALIGNMENT)
        if self._used > self._num_bytes:
            raise ValueError(f"{self._used} bytes of weights, expected {self._num_bytes} at most")
        dense = tensor.contiguous()
        _write(self._fd, dense.flatten().view(torch.uint8).numpy().data, start)
        kept = self.memory[start : start + tensor.nbytes]
        return kept.view(tensor.dtype).view(tensor.shape)

    def seal(self, form: bytes) -> int:
        """End the filling; the descriptor, the caller's from now on."""
        tail = form + _LENGTH.pack(len(form))
        size = _rounded(self._used + len(tail), mmap.PAGESIZE)
        _write(self._fd, memoryview(tail), size - len(tail))
        os.ftruncate(self._fd, size)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
        _touch(self.memory[:size])
        self._room = self._room[:0].clone()
        fd, self._fd = self._fd, -1
        return fd

    def close(self) -> None:
        """Give up what was not sealed. Tensors that are left stay. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def map_sealed(fd: int) -> tuple[Tensor, bytes]:
    """The memory behind a descriptor, to be read only, and its form. The descriptor may be closed.

    Raises:
        UnfitWeights: it is not sealed, or not what `SharedArena.seal` makes.
    """
    size = os.fstat(fd).st_size
    if not is_sealed(fd) or size < _LENGTH.size:
        raise UnfitWeights("the weights that were offered are not sealed, or none at all")
    memory = _mapped(fd, size)
    (length,) = _LENGTH.unpack(bytes(memory[-_LENGTH.size :].numpy()))
    end = size - _LENGTH.size
    if length > end:
        raise UnfitWeights(f"a form of {length} bytes in {size} bytes of weights")
    form = bytes(memory[end - length : end].numpy())
    _touch(memory)
    return memory, form


def _rounded(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


def _mapped(fd: int, num_bytes: int) -> Tensor:
    """Bytes that show what a descriptor holds, now and later, and cannot be written.

    Private, since a shared mapping would stand in the way of the seal on some kernels. Python
    has no tensors over memory that is only read, so it is mapped over other memory's addresses.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8)
    at = memory.data_ptr()
    flags = mmap.MAP_PRIVATE | _MAP_FIXED
    if _libc().mmap(at, num_bytes, mmap.PROT_READ, flags, fd, 0) != at:
        number = ctypes.get_errno()
        raise OSError(number, f"{num_bytes} bytes cannot be mapped: {os.strerror(number)}")
    return memory


def _write(fd: int, data: memoryview, start: int) -> None:
    while len(data):
        written = os.pwrite(fd, data, start)
        data, start = data[written:], start + written


def _touch(memory: Tensor) -> None:
    """Have every page in this process's tables now, not when the first step needs it."""
    memory[:: mmap.PAGESIZE].sum()


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size, pointer, integer = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    libc.mmap.restype = pointer
    libc.mmap.argtypes = (pointer, size, integer, integer, integer, ctypes.c_long)
    return libc
