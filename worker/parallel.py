"""What the tensor-parallel ranks of one worker group say to each other while they compute.

A rank computes its shard's part of each layer; the parts are summed (`all_reduce`), rank 0
gathers the logits (`gather_columns`), samples, and tells the others (`broadcast`). All ranks
call the same collectives in the same order. `join` chooses how they talk: this module only
says what, and `worker.shared_memory`, `worker.gloo` and `worker.nccl` do it.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store  # typed here, and only re-exported

from worker.gloo import GlooCommunicator
from worker.meeting_store import address_towards, open_store
from worker.nccl import NcclCommunicator
from worker.parallel_errors import ColumnsMismatch, MeetingFailed
from worker.shared_memory import SharedMemoryCommunicator


class Communicator(Protocol):
    """One rank's side of its group. Belongs to one thread.

    Collectives may work in place: use what they return, and no longer what was given. The
    first error (`CollectiveFailed`) is final: the group must be restarted as one.
    """

    rank: int
    size: int

    def start_step(self, step: int) -> None:
        """Name the step that the following collectives belong to, for errors. Sends nothing."""
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each.

        Added in rank order in float32 and rounded once to the tensor's dtype, which is
        float32, bfloat16 or float16. The shape is the same on every rank.
        """
        ...

    @property
    def native_all_reduce(self) -> tuple[int | None, int | None]:
        """`all_reduce` in place as a C function, and the first argument it takes (see
        worker/ops/native/kernels/program.cpp); None where there is only the one in Python."""
        ...

    def gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor | None:
        """On rank 0 the [R, sum(widths)] of all ranks' columns side by side; elsewhere None.

        Rank r brings [R, widths[r]]; `widths` is the same on every rank and may be uneven.
        """
        ...

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """On every rank the tensor of rank `source`. The others give one like it to be filled."""
        ...

    def close(self) -> None:
        """Leave the group, at once; a rank that still needs this one then fails. Idempotent."""
        ...


class SingleRank:
    """A group of one: nobody to talk to."""

    rank = 0
    size = 1
    native_all_reduce: tuple[int | None, int | None] = (None, None)

    def start_step(self, step: int) -> None:
        """Nothing can fail, so nothing is noted."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor | None:
        if [tensor.shape[1]] != list(widths):
            raise ColumnsMismatch(self.rank, self.size, widths, tensor.shape)
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        if source != 0:
            raise ValueError(f"rank {source} cannot broadcast in a group of one rank")
        return tensor

    def close(self) -> None:
        """Nothing to leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingPoint:
    """Where the ranks of one group find each other; the same on every rank.

    Shared memory needs the name alone, gloo and NCCL the address as well.
    """

    name: str
    """Of the engine's instance, the group and its epoch: no other start may use it."""

    host: str = ""
    """An address of rank 0's host that all hosts of the group reach."""

    port: int = 0
    """Where rank 0 listens; `meeting_store.listen` finds a free one and holds it."""


def join(
    meeting: MeetingPoint,
    *,
    rank: int,
    size: int,
    device: torch.device,
    is_one_host: bool,
    start_timeout_s: float,
    timeout_s: float,
    listener: socket.socket | None = None,
    own_address: str = "",
    store: Store | None = None,
) -> Communicator:
    """Meet the other ranks of the group, by the fastest way that reaches all of them.

    Args:
        is_one_host: whether all ranks run on one host.
        start_timeout_s: how long to wait for ranks that still start.
        timeout_s: how long a rank may keep the others waiting within a step; more hides a hung
            rank for longer, less fails a group whose ranks are merely busy.
        listener: of rank 0, already listening at the meeting point; taken over, or closed if
            nobody needs to come there.
        own_address: where the others reach this rank; empty: the one that routes to rank 0.
        store: of these ranks alone, where they have one; else they meet at rank 0's.

    Raises:
        MeetingFailed: a rank did not come in time, or does not fit.
    """
    shares_memory = device.type == "cpu" and is_one_host
    if listener is not None and (size == 1 or shares_memory):
        listener.close()
    if size == 1:
        return SingleRank()
    if shares_memory:
        return SharedMemoryCommunicator(
            meeting.name,
            rank=rank,
            size=size,
            start_timeout_s=start_timeout_s,
            timeout_s=timeout_s,
        )
    if store is None:
        if not meeting.host or (meeting.port == 0 and listener is None):
            raise MeetingFailed(
                f"{size} ranks on {device.type}, one host: {is_one_host}, meet at an address of "
                f"rank 0, but got host {meeting.host!r} and port {meeting.port}"
            )
        store = open_store(
            meeting.host,
            meeting.port,
            rank=rank,
            size=size,
            timeout_s=start_timeout_s,
            listener=listener,
        )
    if device.type == "cpu":
        return GlooCommunicator(
            store,
            rank=rank,
            size=size,
            own_address=own_address or address_towards(meeting.host, meeting.port or 1),
            start_timeout_s=start_timeout_s,
            timeout_s=timeout_s,
        )
    return NcclCommunicator(
        store,
        rank=rank,
        size=size,
        device=device,
        start_timeout_s=start_timeout_s,
        timeout_s=timeout_s,
    )
