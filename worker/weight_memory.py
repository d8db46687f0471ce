"""One rank's weights in memory that other ranks of its host may map: filled once, then sealed.

The memory has no name (`memfd_create(2)`): it goes with the last process that holds it, however
that ends. While it is filled nobody else knows of it. When it is whole it is sealed, so that
neither the filler nor anybody who gets the descriptor can change or shorten it, and its own
tensors become read-only where they lie.

A sealed memory ends with a form, which says what lies where, and the form's length.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import struct
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

from worker.errors import UnfitWeights
from worker.kept_weights import SEALS, is_sealed

_ALIGNMENT = 128
_LENGTH = struct.Struct("<Q")
_MADV_POPULATE_WRITE = 23  # madvise(2); since Linux 5.14
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000


class SharedArena:
    """Hands out memory like `worker.ops.native.arena.Arena`, all of it behind one descriptor."""

    def __init__(self, max_bytes: int) -> None:
        """Take addresses; memory is taken as it is handed out.

        Args:
            max_bytes: that may be handed out. More costs nothing but addresses.

        Raises:
            OSError: the system does not let this process have so large a file.
        """
        self._num_bytes = _rounded(max_bytes, mmap.PAGESIZE)
        self._used = 0
        self._fd = os.memfd_create("stoker-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, self._num_bytes)
            self._addresses = _addresses(self._num_bytes)
            self.memory = torch.frombuffer(self._addresses, dtype=torch.uint8)
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            _map_over(self.memory, self._num_bytes, self._fd, protection, mmap.MAP_SHARED)
        except BaseException:
            os.close(self._fd)
            raise
        with suppress(OSError):  # large pages, where the system gives them to shared memory
            self._addresses.madvise(mmap.MADV_HUGEPAGE)

    @property
    def num_bytes(self) -> int:
        """Handed out."""
        return self._used

    def take(self, num_bytes: int) -> Tensor:
        """Bytes (uint8) at the start of two cache lines, zero until they are written.

        Raises:
            OSError: there is no memory.
        """
        start, self._used = self._used, self._used + _rounded(num_bytes, _ALIGNMENT)
        if self._used > self._num_bytes:
            raise ValueError(f"{self._used} bytes of weights, expected {self._num_bytes} at most")
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        try:  # all pages at once, which is faster; and missing memory is an error, not a SIGBUS
            self._addresses.madvise(_MADV_POPULATE_WRITE, page, self._used - page)
        except OSError as error:
            if error.errno != errno.EINVAL:  # an older kernel
                raise
        return self.memory[start : start + num_bytes]

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy in here."""
        kept = self.take(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        return kept.copy_(tensor)

    def seal(self, form: bytes) -> int:
        """End the filling; the descriptor, the caller's from now on. All tensors stay where they
        are, and can only be read."""
        tail = form + _LENGTH.pack(len(form))
        size = _rounded(self._used + len(tail), mmap.PAGESIZE)
        os.ftruncate(self._fd, size)
        os.pwrite(self._fd, tail, size - len(tail))
        # All of it, also what is past the end: no mapping may be left that could write.
        _map_over(self.memory, self._num_bytes, self._fd, mmap.PROT_READ, mmap.MAP_PRIVATE)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
        _touch(self.memory[:size])
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
    memory = torch.frombuffer(_addresses(size), dtype=torch.uint8)
    _map_over(memory, size, fd, mmap.PROT_READ, mmap.MAP_PRIVATE)
    (length,) = _LENGTH.unpack(bytes(memory[-_LENGTH.size :].numpy()))
    end = size - _LENGTH.size
    if length > end:
        raise UnfitWeights(f"a form of {length} bytes in {size} bytes of weights")
    form = bytes(memory[end - length : end].numpy())
    _touch(memory)
    return memory, form


def _rounded(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


def _addresses(num_bytes: int) -> mmap.mmap:
    """Room for something to be mapped over, given back when nothing refers to it any more."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return mmap.mmap(-1, num_bytes, flags=flags)


def _map_over(memory: Tensor, num_bytes: int, fd: int, protection: int, flags: int) -> None:
    """Put the first bytes of a descriptor in the place of what lies at the start of `memory`.

    A private mapping that is only read shows the descriptor's own pages, and unlike a shared one
    does not stand in the way of the seal on any kernel.
    """
    at = memory.data_ptr()
    found = _libc().mmap(at, num_bytes, protection, flags | _MAP_FIXED, fd, 0)
    if found != at:
        number = ctypes.get_errno()
        raise OSError(number, f"{num_bytes} bytes cannot be mapped: {os.strerror(number)}")


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
