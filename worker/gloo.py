"""Collectives between CPU ranks on several hosts, over TCP, by torch's gloo backend.

Built of sends and receives between pairs of ranks, not of gloo's own collectives: so sums are
made in rank order, shards may be uneven, and an error knows which rank did not answer.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store  # typed here, and only re-exported

from worker.parallel_errors import (
    CollectiveFailed,
    CollectiveTimeout,
    ColumnsMismatch,
    MeetingFailed,
    PeerLost,
    first_line,
)

SMALL_BYTES = 64 * 1024
"""Up to here every rank sends all others everything; beyond, each sums its share and sends that
on: two waits, but a rank of n sends 2 (n - 1) / n times the tensor instead of n - 1 times."""

_SUMMED = (torch.float32, torch.bfloat16, torch.float16)
_ALL_REDUCE, _SHARES, _BROADCAST, _GATHER, _PAIR = range(5)


class _Pairs(Protocol):
    """What of a torch backend is used here, and missing in its stub."""

    def send(self, tensors: list[Tensor], dst_rank: int, tag: int, /) -> dist.Work: ...
    def recv(self, tensors: list[Tensor], src_rank: int, tag: int, /) -> dist.Work: ...
    def shutdown(self) -> None: ...


class GlooCommunicator:
    """One rank of a group of CPU ranks that need not share a host. Not for several threads."""

    native_all_reduce: tuple[int | None, int | None] = (None, None)

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        own_address: str,
        start_timeout_s: float,
        timeout_s: float,
    ) -> None:
        """Connect to all other ranks, which must come to the same store.

        `own_address` is where the others reach this rank; see `address_towards`.

        Raises:
            MeetingFailed: a rank did not come within `start_timeout_s`.
        """
        self.rank, self.size = rank, size
        self._peers = [peer for peer in range(size) if peer != rank]
        self._step = 0
        self._collective = 0
        self._timeout_s = timeout_s
        self._failure: tuple[type[CollectiveFailed], str, int] | None = None
        store.set_timeout(timedelta(seconds=start_timeout_s))
        try:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # no stub
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address)]
            options._timeout = timedelta(seconds=start_timeout_s)
            gloo = cast(_Pairs, dist.ProcessGroupGloo(store, rank, size, options))
            self._gloo: _Pairs | None = gloo
        except RuntimeError as error:
            raise MeetingFailed(
                f"rank {rank} of {size}, reached at {own_address}, did not connect to all others "
                f"within {start_timeout_s:g} s: {first_line(error)}. Look for a rank that ended, "
                "and for a firewall: gloo takes any free port."
            ) from error

    def start_step(self, step: int) -> None:
        self._step = step

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if tensor.dtype not in _SUMMED:
            raise TypeError(f"all_reduce sums {list(_SUMMED)}, not {tensor.dtype}")
        self._begin()
        dense = tensor.contiguous()
        flat = dense.view(-1)
        if self.size == 2 or flat.numel() * flat.element_size() <= SMALL_BYTES:
            others = {peer: torch.empty_like(flat) for peer in self._peers}
            self._exchange(_ALL_REDUCE, dict.fromkeys(self._peers, flat), others)
            flat.copy_(self._sum({**others, self.rank: flat}))
        else:
            self._reduce_by_shares(flat)
        return dense

    def gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor | None:
        rows = tensor.shape[0]
        if len(widths) != self.size or tensor.shape != (rows, widths[self.rank]):
            raise ColumnsMismatch(self.rank, self.size, widths, tensor.shape)
        self._begin()
        if self.rank != 0:
            self._exchange(_GATHER, {0: tensor.contiguous()}, {})
            return None
        others = {peer: tensor.new_empty((rows, widths[peer])) for peer in self._peers}
        self._exchange(_GATHER, {}, others)
        return torch.cat([tensor, *others.values()], dim=1)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        if not 0 <= source < self.size:
            raise ValueError(f"rank {source} cannot broadcast in a group of {self.size} ranks")
        self._begin()
        dense = tensor.contiguous()
        if self.rank == source:
            self._exchange(_BROADCAST, dict.fromkeys(self._peers, dense), {})
        else:
            self._exchange(_BROADCAST, {}, {source: dense})
        return dense

    def post(self, tensor: Tensor, peer: int) -> dist.Work:
        """Begin to send a contiguous tensor to one other rank, which `take`s it.

        It must stay as it is until `finish` has returned.
        """
        self._begin()
        with self._blaming(peer):
            return self._open_gloo().send([tensor], peer, self._tag(_PAIR))

    def finish(self, sending: dist.Work, peer: int) -> None:
        """Wait until `peer` has taken what was posted."""
        with self._blaming(peer):
            sending.wait(timedelta(seconds=self._timeout_s))

    def take(self, into: Tensor, peer: int) -> None:
        """Fill a contiguous tensor with what one other rank posts."""
        self._begin()
        self._exchange(_PAIR, {}, {peer: into})

    def close(self) -> None:
        if self._gloo is not None:
            self._gloo.shutdown()
            self._gloo = None  # and with it its threads and sockets

    def _reduce_by_shares(self, flat: Tensor) -> None:
        """Sum one share of `flat` here, then take the other shares' sums."""
        shares = torch.tensor_split(flat, self.size)
        own = shares[self.rank]
        others = {peer: torch.empty_like(own) for peer in self._peers}
        self._exchange(_ALL_REDUCE, {peer: shares[peer] for peer in self._peers}, others)
        own.copy_(self._sum({**others, self.rank: own}))
        sums = {peer: shares[peer] for peer in self._peers}
        self._exchange(_SHARES, dict.fromkeys(self._peers, own), sums)

    def _sum(self, part_by_rank: dict[int, Tensor]) -> Tensor:
        """The sum in rank order, in float32, on every rank the same bits."""
        total = part_by_rank[0].to(torch.float32, copy=True)
        for rank in range(1, self.size):
            total += part_by_rank[rank]
        return total

    def _begin(self) -> None:
        if self._failure is not None:
            raise self._describe(*self._failure)
        self._collective += 1

    def _tag(self, kind: int) -> int:
        """The number of a message, which keeps another collective's from being taken for it."""
        return (self._collective * 8 + kind) % 2**31

    def _open_gloo(self) -> _Pairs:
        if self._gloo is None:
            raise RuntimeError(f"rank {self.rank} has closed its communicator")
        return self._gloo

    def _exchange(
        self, kind: int, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]
    ) -> None:
        """Send to and receive from peers at once, and wait until all of it is through."""
        tag = self._tag(kind)
        gloo, works = self._open_gloo(), []
        for peer, part in incoming.items():
            with self._blaming(peer):
                works.append((peer, gloo.recv([part], peer, tag)))
        for peer, part in outgoing.items():
            with self._blaming(peer):
                works.append((peer, gloo.send([part], peer, tag)))
        for peer, work in works:
            with self._blaming(peer):
                work.wait(timedelta(seconds=self._timeout_s))

    @contextmanager
    def _blaming(self, peer: int) -> Iterator[None]:
        """Turn gloo's error about the connection to `peer` into ours, which is final."""
        try:
            yield
        except RuntimeError as error:
            reason = first_line(error)
            if "timed out" in reason.lower():
                kind: type[CollectiveFailed] = CollectiveTimeout
                why = f"waited {self._timeout_s:g} s for rank {peer} ({reason})"
            else:
                kind, why = PeerLost, f"the connection to rank {peer} is broken ({reason})"
            self._failure = (kind, why, peer)
            raise self._describe(kind, why, peer) from error

    def _describe(self, kind: type[CollectiveFailed], why: str, peer: int) -> CollectiveFailed:
        return kind(why, rank=self.rank, peer=peer, step=self._step, collective=self._collective)
