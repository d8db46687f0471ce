"""Collectives between the CPU ranks of one host, through shared memory.

The work is done by `ops/native/shared_reduce.cpp`, which says how; this module loads it, hands
it tensors and turns its verdicts into errors. Invariant: after the first failure every further
collective fails with the same verdict, on every rank.
"""

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from worker.ops.native.library import open_library
from worker.parallel_errors import (
    CollectiveFailed,
    CollectiveTimeout,
    ColumnsMismatch,
    MeetingFailed,
    OutOfStep,
    PeerLost,
)
from worker.segment import share_segment

VERSION = 1
"""Of the native interface and of the layout of the shared memory."""

PIECE_BYTES = 256 * 1024
"""What a rank passes at a time. More: fewer waits for large tensors, until two pieces of each
rank no longer fit the cores' caches."""

_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_BYTES_MASK = (1 << 52) - 1
_STILL_WAITING = 1


_Collective = Callable[..., int]


class _Failure(ctypes.Structure):
    """`StokerFailure` of the native library."""

    _fields_ = (
        ("outcome", ctypes.c_int32),
        ("peer", ctypes.c_int32),
        ("finder", ctypes.c_int32),
        ("round", ctypes.c_uint64),
        ("peer_round", ctypes.c_uint64),
        ("peer_step", ctypes.c_int64),
        ("own_signature", ctypes.c_uint64),
        ("peer_signature", ctypes.c_uint64),
    )
    outcome: int
    peer: int
    finder: int
    round: int
    peer_round: int
    peer_step: int
    own_signature: int
    peer_signature: int


class SharedMemoryCommunicator:
    """One rank of a group whose ranks are processes of one host. Not for several threads.

    A collective costs 4 to 15 µs for the few kilobytes of a decode step. Waiting spins, then
    yields, then sleeps, and lets other Python threads run all the while.
    """

    def __init__(
        self,
        meeting: str,
        *,
        rank: int,
        size: int,
        start_timeout_s: float,
        timeout_s: float,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """Meet the other ranks; `worker.segment.share_segment` says what `meeting` must be.

        Raises:
            MeetingFailed: they did not come within `start_timeout_s`, or do not fit.
            NativeLibraryMissing: it was not built.
        """
        self.rank, self.size = rank, size
        self._step = 0
        self._collective = 0
        self._timeout_s = timeout_s
        self._native = load_native()
        most = self._native.stoker_shared_max_ranks()
        if not 0 <= rank < size <= most:
            raise MeetingFailed(
                f"rank {rank} of {size} cannot be: one host holds 1 to {most} ranks"
            )
        self._segment = share_segment(
            meeting,
            rank=rank,
            size=size,
            num_bytes=self._native.stoker_shared_bytes(size, piece_bytes),
            version=VERSION,
            timeout_s=start_timeout_s,
        )
        self._group: int | None = self._native.stoker_shared_open(
            self._segment.fd, rank, size, piece_bytes, int(timeout_s * 1e9)
        )
        if self._group is None:
            self._segment.close()
            raise MeetingFailed(
                f"rank {rank} cannot map the shared memory of {meeting!r}: "
                f"errno {ctypes.get_errno()}"
            )

    def start_step(self, step: int) -> None:
        self._step = step
        self._native.stoker_shared_start_step(self._open_group(), step)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        group = self._open_group()
        code = _DTYPE_CODES.get(tensor.dtype)
        if code is None:
            raise TypeError(f"all_reduce sums {list(_DTYPE_CODES)}, not {tensor.dtype}")
        dense = tensor.contiguous()
        self._complete(
            self._native.stoker_shared_all_reduce, group, dense.data_ptr(), dense.numel(), code
        )
        return dense

    @property
    def native_all_reduce(self) -> tuple[int | None, int | None]:
        """`all_reduce` as a C function, and its first argument (`StokerGroup`)."""
        function = ctypes.cast(self._native.stoker_shared_all_reduce, ctypes.c_void_p).value
        assert function is not None
        return function, self._open_group()

    def gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor | None:
        group = self._open_group()
        rows = tensor.shape[0]
        if len(widths) != self.size or tensor.shape != (rows, widths[self.rank]):
            raise ColumnsMismatch(self.rank, self.size, widths, tensor.shape)
        dense = tensor.contiguous()
        whole = dense.new_empty((rows, sum(widths))) if self.rank == 0 else None
        width_bytes = (ctypes.c_uint64 * self.size)(*(w * dense.element_size() for w in widths))
        self._complete(
            self._native.stoker_shared_gather,
            group,
            dense.data_ptr(),
            None if whole is None else whole.data_ptr(),
            rows,
            width_bytes,
            0,
        )
        return whole

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        group = self._open_group()
        if not 0 <= source < self.size:
            raise ValueError(f"rank {source} cannot broadcast in a group of {self.size} ranks")
        dense = tensor.contiguous()
        self._complete(
            self._native.stoker_shared_broadcast,
            group,
            dense.data_ptr(),
            dense.numel() * dense.element_size(),
            source,
        )
        return dense

    def close(self) -> None:
        if self._group is not None:
            self._native.stoker_shared_close(self._group)
            self._group = None
            self._segment.close()

    def _open_group(self) -> int:
        if self._group is None:
            raise RuntimeError(f"rank {self.rank} has closed its communicator")
        return self._group

    def _complete(self, function: _Collective, *arguments: object) -> None:
        """Run a native collective to its end.

        It returns now and then from a long wait, so that signals are handled here and dead
        processes seen. Whatever stops it halfway breaks the group: no rank may take the rest
        for another collective.
        """
        self._collective += 1
        try:
            while outcome := function(*arguments):
                if outcome != _STILL_WAITING:
                    raise self._failure()
                gone = sum(1 << rank for rank in self._segment.gone())
                self._native.stoker_shared_note_gone(self._group, gone)
        except BaseException:
            self._native.stoker_shared_give_up(self._group)
            raise

    def _failure(self) -> CollectiveFailed:
        failure = _Failure()
        self._native.stoker_shared_failure(self._group, ctypes.byref(failure))
        peer, finder = failure.peer, failure.finder
        seen = f"rank {peer} was last seen in step {failure.peer_step}, round {failure.peer_round}"
        kind, why = {
            2: (
                CollectiveTimeout,
                f"rank {finder} waited {self._timeout_s:g} s for rank {peer}; {seen}",
            ),
            3: (PeerLost, f"rank {finder} found that the process of rank {peer} has ended; {seen}"),
            4: (PeerLost, f"rank {finder} still needed rank {peer}, which has closed; {seen}"),
            5: (OutOfStep, f"rank {finder} found rank {peer} out of step: {_compare(failure)}"),
            6: (PeerLost, f"rank {peer} was interrupted in a collective; {seen}"),
        }[failure.outcome]
        return kind(
            f"{_describe(failure.own_signature)} in round {failure.round} failed: {why}",
            rank=self.rank,
            peer=peer,
            step=self._step,
            collective=self._collective,
        )


def load_native() -> ctypes.CDLL:
    """The compiled `shared_reduce.cpp`, with the types of its functions set.

    Raises:
        NativeLibraryMissing: there is none beside its source, or it is of another version.
    """
    native = open_library("shared_reduce", "stoker_shared_version", VERSION)
    group, pointer = ctypes.c_void_p, ctypes.c_void_p
    i32, i64, u64 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64
    native.stoker_shared_bytes.argtypes = (i32, u64)
    native.stoker_shared_bytes.restype = u64
    native.stoker_shared_open.argtypes = (i32, i32, i32, u64, i64)
    native.stoker_shared_open.restype = group
    native.stoker_shared_start_step.argtypes = (group, i64)
    native.stoker_shared_start_step.restype = None
    native.stoker_shared_all_reduce.argtypes = (group, pointer, u64, i32)
    native.stoker_shared_broadcast.argtypes = (group, pointer, u64, i32)
    native.stoker_shared_gather.argtypes = (
        group,
        pointer,
        pointer,
        u64,
        ctypes.POINTER(ctypes.c_uint64),
        i32,
    )
    native.stoker_shared_note_gone.argtypes = (group, u64)
    native.stoker_shared_note_gone.restype = None
    native.stoker_shared_give_up.argtypes = (group,)
    native.stoker_shared_give_up.restype = None
    native.stoker_shared_failure.argtypes = (group, ctypes.POINTER(_Failure))
    native.stoker_shared_failure.restype = None
    native.stoker_shared_close.argtypes = (group,)
    native.stoker_shared_close.restype = None
    return native


def _describe(signature: int) -> str:
    """A collective's signature in words; see `begin` in the native source."""
    operation, detail, num_bytes = signature >> 60, signature >> 52 & 0xFF, signature & _BYTES_MASK
    match operation:
        case 1:
            dtype = next(dtype for dtype, code in _DTYPE_CODES.items() if code == detail)
            return f"all_reduce of {num_bytes} bytes of {dtype}"
        case 2:
            return f"broadcast of {num_bytes} bytes from rank {detail}"
        case 3:
            return f"gather_columns of {num_bytes} bytes to rank {detail}"
    return "no collective yet"


def _compare(failure: _Failure) -> str:
    return f"it is in {_describe(failure.peer_signature)}, step {failure.peer_step}"
