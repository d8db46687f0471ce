"""Pipeline stages on GPUs, by torch's NCCL backend: hidden states are queued, no host waits.

A group of torch's for each stage and for each pair of neighbours, so that a transfer waits for
no collective. What was sent is kept until the next stage has taken it; two steps may be on their
way, and the third waits on the device, not on the host.
"""

from collections import deque
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store  # typed here, and only re-exported

from worker.nccl import NcclCommunicator, begin_torch, end_torch
from worker.parallel import Communicator, SingleRank
from worker.parallel_errors import MeetingFailed, first_line
from worker.pipeline import NUM_ON_THEIR_WAY, Ends, Pipes


class NcclPipe:
    """Between two GPUs. A transfer that does not end within the time limit ends the process."""

    def __init__(self, group: dist.ProcessGroup, ends: Ends, device: torch.device) -> None:
        """Connect to the other end now: the first transfer makes the connection."""
        self._group, self._other = group, 1 - ends.index
        self._on_their_way: deque[tuple[Tensor, dist.Work]] = deque()
        number = torch.zeros(1, device=device)
        for is_sending in (ends.index == 0, ends.index == 1):
            if is_sending:
                self.send(number)
            else:
                self.receive(number)
        float(number)  # waits for the device

    def start_step(self, step: int) -> None:
        """Nothing to note: an error here ends the process, and names NCCL's own counters."""

    def send(self, tensor: Tensor) -> None:
        if len(self._on_their_way) == NUM_ON_THEIR_WAY:
            self._on_their_way.popleft()[1].wait()
        kept = tensor.clone(memory_format=torch.contiguous_format)
        work = dist.isend(kept, group=self._group, group_dst=self._other)
        assert work is not None, "this rank is in the group"
        self._on_their_way.append((kept, work))

    def receive(self, into: Tensor) -> None:
        work = dist.irecv(into, group=self._group, group_src=self._other)
        assert work is not None, "this rank is in the group"
        work.wait()

    def close(self) -> None:
        self._on_their_way.clear()
        end_torch()


def meet_on_gpus(
    store: Store,
    ends: Sequence[Ends],
    *,
    rank: int,
    num_stages: int,
    ranks_per_stage: int,
    device: torch.device,
    start_timeout_s: float,
    timeout_s: float,
    backend: str = "nccl",
) -> tuple[Communicator, Pipes]:
    """Meet all ranks of a group with several stages, one GPU each.

    Args:
        ends: of this rank's pipes.
        backend: another one of torch's, for tests without GPUs.

    Raises:
        MeetingFailed: a rank did not come within `start_timeout_s`.
    """
    size = num_stages * ranks_per_stage
    device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0", as torch wants it
    try:
        begin_torch(store, rank, size, device, start_timeout_s, timeout_s, backend)
        # Every rank takes part in the making of every group, in the same order.
        limit = timedelta(seconds=timeout_s)
        stages = [
            dist.new_group(list(range(first, first + ranks_per_stage)), timeout=limit)
            for first in range(0, size, ranks_per_stage)
        ]
        after = [
            dist.new_group([first, first + ranks_per_stage], timeout=limit)
            for first in range(size - ranks_per_stage)
        ]
        communicator: Communicator = SingleRank()
        if ranks_per_stage > 1:
            communicator = NcclCommunicator.of_group(
                stages[rank // ranks_per_stage], rank % ranks_per_stage, ranks_per_stage, device
            )
        pipes = [NcclPipe(after[min(e.rank, e.other_rank)], e, device) for e in ends]
    except (RuntimeError, ValueError) as error:
        raise MeetingFailed(
            f"rank {rank} of {size} on {device} did not connect to all others by {backend} "
            f"within {start_timeout_s:g} s: {first_line(error)}"
        ) from error
    is_first, is_last = rank < ranks_per_stage, rank >= size - ranks_per_stage
    return communicator, Pipes(
        before=None if is_first else pipes[0], after=None if is_last else pipes[-1]
    )
