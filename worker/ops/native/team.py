"""The native kernels: loading them, choosing a level of instruction sets, running operations.

A level is what the kernels were compiled for: amx, avx512, avx2, neon or portable. The best that
this machine runs is taken, unless one is named.
"""

import ctypes
import os
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from worker.ops.native.arena import Arena, Memory
from worker.ops.native.library import open_library
from worker.ops.native.structs import Batch, DrawArgs, Format, Operation

VERSION = 1
"""Of the native interface."""

FORMATS = {
    torch.float32: Format.FLOAT32,
    torch.bfloat16: Format.BFLOAT16,
    torch.float16: Format.FLOAT16,
    torch.int8: Format.INT8,
}


class Team:
    """The computing threads of this process, with one level's kernels. For one caller at a time."""

    def __init__(self, num_threads: int = 1, level: str | None = None) -> None:
        """Start `num_threads` - 1 threads, each on a core of its own where there are enough.

        Raises:
            ValueError: this machine does not run that level.
            NativeLibraryMissing: the library was not built.
        """
        self._native = load()
        self.arena: Memory = Arena()
        """Where packed weights go."""
        known = levels()
        if level is not None and level not in known:
            raise ValueError(f"level must be one of {', '.join(known)} on this machine: {level!r}")
        self.level = level or known[0]
        self.num_threads = num_threads
        cores = sorted(os.sched_getaffinity(0))
        pins = None
        if 1 < num_threads <= len(cores):
            pins = (ctypes.c_int32 * (num_threads - 1))(*cores[1:num_threads])
        self._engine: int | None = self._native.stoker_kernels_open(
            self.level.encode(), num_threads, pins
        )
        if self._engine is None:
            raise MemoryError(f"no room for {num_threads} computing threads")

    def close(self) -> None:
        """End the threads. Idempotent."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._native.stoker_kernels_close(engine)

    def __del__(self) -> None:
        if getattr(self, "_engine", None) is not None:
            self.close()

    def pack(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """A dense weight [out_features, in_features] in the kernels' own order, as `dtype`."""
        out_features, in_features = weight.shape
        dense, wanted = weight.contiguous(), FORMATS[dtype]
        num_bytes = self._native.stoker_packed_bytes(
            self._engine, out_features, in_features, wanted
        )
        packed = self.arena.room(num_bytes)
        self._native.stoker_pack_linear(
            self._engine,
            dense.data_ptr(),
            FORMATS[dense.dtype],
            packed.data_ptr(),
            wanted,
            out_features,
            in_features,
        )
        return self.arena.settle(packed)

    def linear_scratch_bytes(self, rows: int, in_features: int, dtype: torch.dtype) -> int:
        """What a linear layer of so many rows needs beside its input and output."""
        found: int = self._native.stoker_linear_scratch_bytes(
            self._engine, rows, in_features, FORMATS[dtype]
        )
        return found

    def draw(self, args: DrawArgs) -> None:
        """Choose a token for each row of logits."""
        self._native.stoker_draw(self._engine, ctypes.byref(args))

    def run(self, operations: "ctypes.Array[Operation]", batch: Batch, start: int = 0) -> int:
        """Run a list of operations from `start` on.

        Returns:
            its length; or the index of an all-reduce that the caller must complete before it
            goes on with the one after.
        """
        reached: int = self._native.stoker_run(
            self._engine, operations, start, len(operations), ctypes.byref(batch)
        )
        return reached


def as_array(operations: Sequence[Operation]) -> "ctypes.Array[Operation]":
    """A list of operations as `Team.run` takes it."""
    return (Operation * len(operations))(*operations)


@cache
def levels() -> tuple[str, ...]:
    """What this machine runs, the best first."""
    native, found = load(), []
    index = 0
    while (name := native.stoker_kernels_level(index)) is not None:
        if name:
            found.append(name.decode())
        index += 1
    return tuple(found)


@cache
def load() -> ctypes.CDLL:
    """The library with its functions' types.

    Raises:
        NativeLibraryMissing: it was not built, or is of another version.
    """
    native = open_library("kernels", "stoker_kernels_version", VERSION)
    long, integer, pointer = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p
    for name, result, arguments in (
        ("stoker_kernels_size_of", long, (integer,)),
        ("stoker_kernels_level", ctypes.c_char_p, (integer,)),
        ("stoker_kernels_open", pointer, (ctypes.c_char_p, integer, pointer)),
        ("stoker_kernels_close", None, (pointer,)),
        ("stoker_packed_bytes", long, (pointer, long, long, integer)),
        (
            "stoker_pack_linear",
            None,
            (pointer, pointer, integer, pointer, integer, long, long),
        ),
        ("stoker_linear_scratch_bytes", long, (pointer, long, long, integer)),
        ("stoker_draw", None, (pointer, pointer)),
        ("stoker_run", long, (pointer, pointer, long, long, pointer)),
    ):
        function = getattr(native, name)
        function.restype, function.argtypes = result, arguments
    sizes = tuple(native.stoker_kernels_size_of(what) for what in range(4))
    wanted = (
        ctypes.sizeof(Operation),
        ctypes.sizeof(Batch),
        Operation.args.offset,
        ctypes.sizeof(DrawArgs),
    )
    assert sizes == wanted, f"the library's structs have {sizes} bytes, their mirror {wanted}"
    return native
