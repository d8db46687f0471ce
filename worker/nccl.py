"""Collectives between CUDA ranks, by torch's NCCL backend; all may be captured in CUDA graphs.

NCCL's own sum gives every rank the same bits, but beyond two ranks the order of its additions
depends on the size of the message, so on what else is in the batch, and 16-bit sums are rounded
at every addition. Here sums are made in rank order and rounded once, from the parts that NCCL
moves; that costs a few small kernels more.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store  # typed here, and only re-exported
from torch.nn import functional

from worker.parallel_errors import ColumnsMismatch, MeetingFailed, first_line

SMALL_BYTES = 256 * 1024
"""Up to here every rank gets all parts and sums them; beyond, each sums a share and passes it
on: one more transfer, but a rank of n receives 2 (n - 1) / n times the tensor, not n - 1 times."""


class NcclCommunicator:
    """One rank of a group of GPUs, one each. A process can be in one such group at a time.

    Every collective is queued on the current stream and returns at once. One that does not end
    within the time limit ends the process: NCCL cannot be interrupted otherwise. Before a shape
    is captured in a graph it must have run once, so that NCCL has made what it needs for it.
    """

    native_all_reduce: tuple[int | None, int | None] = (None, None)

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        device: torch.device,
        start_timeout_s: float,
        timeout_s: float,
        sums_in_rank_order: bool = True,
        backend: str = "nccl",
    ) -> None:
        """Connect to all other ranks, which must come to the same store.

        Args:
            sums_in_rank_order: False leaves sums to NCCL: faster from three ranks on, but a
                sequence's bits then depend on the rest of its batch.
            backend: another one of torch's, for tests without GPUs.

        Raises:
            MeetingFailed: a rank did not come within `start_timeout_s`.
        """
        self.rank, self.size = rank, size
        self._sums_in_rank_order = sums_in_rank_order
        self._group: dist.ProcessGroup | None = None
        device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0", as torch wants it
        try:
            begin_torch(store, rank, size, device, start_timeout_s, timeout_s, backend)
            self._use_once(device)
        except (RuntimeError, ValueError) as error:
            raise MeetingFailed(
                f"rank {rank} of {size} on {device} did not connect to all others by {backend} "
                f"within {start_timeout_s:g} s: {first_line(error)}"
            ) from error

    @classmethod
    def of_group(
        cls, group: dist.ProcessGroup, rank: int, size: int, device: torch.device
    ) -> "NcclCommunicator":
        """Of some of the ranks that have met already (`begin_torch`)."""
        made = cls.__new__(cls)
        made.rank, made.size = rank, size
        made._sums_in_rank_order, made._group = True, group
        made._use_once(device)
        return made

    def _use_once(self, device: torch.device) -> None:
        """Connections are made by the first use, which must not be within a graph's capture."""
        self.all_reduce(torch.zeros(SMALL_BYTES, dtype=torch.float32, device=device))
        self.all_reduce(torch.zeros(1, dtype=torch.float32, device=device))
        self.gather_columns(torch.zeros(1, 1, device=device), [1] * self.size)
        float(self.broadcast(torch.zeros(1, device=device)))  # waits for the device

    def start_step(self, step: int) -> None:
        """Nothing to note: an error here ends the process, and names NCCL's own counters."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        dense = tensor.contiguous()
        # Two parts have one order only, and one addition is rounded once.
        if self.size == 2 or not self._sums_in_rank_order:
            dist.all_reduce(dense, group=self._group)
            return dense
        flat = dense.view(-1)
        if flat.numel() * flat.element_size() <= SMALL_BYTES:
            flat.copy_(_sum_rows(self._all_gather(flat)))
        else:
            self._reduce_by_shares(flat)
        return dense

    def gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor | None:
        rows = tensor.shape[0]
        if len(widths) != self.size or tensor.shape != (rows, widths[self.rank]):
            raise ColumnsMismatch(self.rank, self.size, widths, tensor.shape)
        widest = max(widths)  # NCCL gathers equal shapes only
        missing = widest - tensor.shape[1]
        padded = (functional.pad(tensor, (0, missing)) if missing else tensor).contiguous()
        if self.rank != 0:
            dist.gather(padded, group=self._group, group_dst=0)
            return None
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.gather(padded, parts, group=self._group, group_dst=0)
        return torch.cat(
            [part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1
        )

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        dense = tensor.contiguous()
        dist.broadcast(dense, group=self._group, group_src=source)
        return dense

    def close(self) -> None:
        end_torch()

    def _all_gather(self, flat: Tensor) -> Tensor:
        rows = flat.new_empty((self.size, flat.numel()))
        dist.all_gather_into_tensor(rows.view(-1), flat, group=self._group)
        return rows

    def _reduce_by_shares(self, flat: Tensor) -> None:
        """Sum one share of `flat` here, then take the other shares' sums."""
        share = -(-flat.numel() // self.size)
        missing = share * self.size - flat.numel()
        outgoing = functional.pad(flat, (0, missing)) if missing else flat
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing, group=self._group)
        own = _sum_rows(incoming.view(self.size, share)).to(flat.dtype)
        flat.copy_(self._all_gather(own).view(-1)[: flat.numel()])


def begin_torch(
    store: Store,
    rank: int,
    size: int,
    device: torch.device,
    start_timeout_s: float,
    timeout_s: float,
    backend: str,
) -> None:
    """Make this process one of torch's ranks, all of which come to the same store."""
    store.set_timeout(timedelta(seconds=start_timeout_s))
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )


def end_torch() -> None:
    """Leave all groups of torch's. Idempotent."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _sum_rows(rows: Tensor) -> Tensor:
    """[n, m] to [m], row after row, in float32: `torch.sum` promises no order."""
    total = rows[0].to(torch.float32, copy=True)
    for row in rows[1:]:
        total += row
    return total
