"""What neighbouring pipeline stages of one worker group say to each other: hidden states.

A rank passes its step's hidden states on to the rank of the same place in the next stage, and
goes on with the next step: what it has sent is read when the next stage comes to it. Two steps
may be on their way; who would send a third waits. Each pipe joins two ranks, in shared memory
where they are processes of one host (`SharedMemoryPipe`), else over TCP (`GlooPipe`), and on GPUs
by NCCL (`worker.nccl_pipe`).
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store  # typed here, and only re-exported

from worker.gloo import GlooCommunicator
from worker.parallel_errors import CollectiveFailed, CollectiveTimeout, OutOfStep
from worker.shared_memory import SharedMemoryCommunicator

NUM_ON_THEIR_WAY = 2
"""Steps that may be sent and not taken."""

MOST_PIECE_BYTES = 16 * 1024 * 1024
"""Of shared memory for one step on its way. Larger steps go in pieces, and their sender may wait.
More: longer steps pass at once, at the price of four times as much memory of the host."""

_PAGE_BYTES = 4096


class Pipe(Protocol):
    """One rank's end. Both ends may send; what one sends, the other receives, in order.

    The first error (`CollectiveFailed`) is final: the group must be restarted as one.
    """

    def start_step(self, step: int) -> None:
        """Name the step that follows, for errors."""
        ...

    def send(self, tensor: Tensor) -> None:
        """Pass a tensor on; it may be overwritten afterwards."""
        ...

    def receive(self, into: Tensor) -> None:
        """Fill a contiguous tensor with what comes next; the other end sent one like it."""
        ...

    def close(self) -> None:
        """Leave, at once; a rank that still needs this one then fails. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Pipes:
    """A rank's neighbours: the same place in the stages before and after its own."""

    before: Pipe | None = None
    after: Pipe | None = None

    def start_step(self, step: int) -> None:
        for pipe in self._both():
            pipe.start_step(step)

    def meet(self, token: Tensor) -> None:
        """Return when the ranks of all stages have come here. `token` is one number."""
        if self.before is not None:
            self.before.receive(token)
        if self.after is not None:
            self.after.send(token)
            self.after.receive(token)
        if self.before is not None:
            self.before.send(token)

    def close(self) -> None:
        for pipe in self._both():
            pipe.close()

    def _both(self) -> Iterator[Pipe]:
        return (pipe for pipe in (self.before, self.after) if pipe is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Who is at this end of a pipe and who at the other: numbers of the group's."""

    stage: int
    rank: int
    other_stage: int
    other_rank: int
    timeout_s: float
    """How long one may keep the other waiting."""

    @property
    def index(self) -> int:
        """0 for the end that is nearer to the first stage."""
        return 0 if self.stage < self.other_stage else 1

    @contextmanager
    def telling(self, what: str, step: int, number: int) -> Iterator[None]:
        """Turn the error of a pair of ranks into one that names stages and step."""
        try:
            yield
        except CollectiveFailed as error:
            other = f"stage {self.other_stage} (rank {self.other_rank})"
            if isinstance(error, CollectiveTimeout):
                why = f"waited {self.timeout_s:g} s for {other}"
            elif isinstance(error, OutOfStep):
                why = f"found {other} out of step"
            else:
                why = f"lost {other}, whose process has ended or left"
            raise type(error)(
                f"stage {self.stage} {why} while it {what}",
                rank=self.rank,
                peer=self.other_rank,
                step=step,
                collective=number,
            ) from error


NO_PIPES = Pipes()
"""Of a rank that has all layers."""


class SharedMemoryPipe:
    """Between processes of one host. Not for several threads.

    A broadcast is what it takes: its source puts a piece where the other finds it, and waits only
    for the piece before the last one to be taken. Waiting spins, then yields, then sleeps.
    """

    def __init__(
        self, meeting: str, ends: Ends, *, step_bytes: int, start_timeout_s: float
    ) -> None:
        """Meet the other end; `step_bytes` is what the largest step sends, the same at both ends.

        Raises:
            MeetingFailed: it did not come within `start_timeout_s`, or does not fit.
        """
        self._ends = ends
        self._step = self._number = 0
        piece_bytes = min(step_bytes, MOST_PIECE_BYTES)
        self._pair = SharedMemoryCommunicator(
            meeting,
            rank=ends.index,
            size=2,
            start_timeout_s=start_timeout_s,
            timeout_s=ends.timeout_s,
            piece_bytes=-(-piece_bytes // _PAGE_BYTES) * _PAGE_BYTES,
        )

    def start_step(self, step: int) -> None:
        self._step = step
        self._pair.start_step(step)

    def send(self, tensor: Tensor) -> None:
        self._number += 1
        with self._ends.telling("sent its hidden states", self._step, self._number):
            self._pair.broadcast(tensor, self._ends.index)

    def receive(self, into: Tensor) -> None:
        assert into.is_contiguous(), "else a copy would be filled"
        self._number += 1
        with self._ends.telling("wanted its hidden states", self._step, self._number):
            self._pair.broadcast(into, 1 - self._ends.index)

    def close(self) -> None:
        self._pair.close()


class GlooPipe:
    """Between CPU ranks of two hosts, over TCP. Not for several threads."""

    def __init__(
        self, store: Store, ends: Ends, *, own_address: str, start_timeout_s: float
    ) -> None:
        """Connect to the other end, which must come to the same store.

        Raises:
            MeetingFailed: it did not come within `start_timeout_s`.
        """
        self._ends = ends
        self._step = self._number = 0
        self._other = 1 - ends.index
        self._pair = GlooCommunicator(
            store,
            rank=ends.index,
            size=2,
            own_address=own_address,
            start_timeout_s=start_timeout_s,
            timeout_s=ends.timeout_s,
        )
        self._on_their_way: deque[tuple[Tensor, dist.Work]] = deque()

    def start_step(self, step: int) -> None:
        self._step = step
        self._pair.start_step(step)

    def send(self, tensor: Tensor) -> None:
        self._number += 1
        with self._ends.telling("sent its hidden states", self._step, self._number):
            if len(self._on_their_way) == NUM_ON_THEIR_WAY:
                self._pair.finish(self._on_their_way.popleft()[1], self._other)
            kept = tensor.clone(memory_format=torch.contiguous_format)
            self._on_their_way.append((kept, self._pair.post(kept, self._other)))

    def receive(self, into: Tensor) -> None:
        assert into.is_contiguous(), "else a copy would be filled"
        self._number += 1
        with self._ends.telling("wanted its hidden states", self._step, self._number):
            self._pair.take(into, self._other)

    def close(self) -> None:
        self._pair.close()
        self._on_their_way.clear()
