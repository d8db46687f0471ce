"""A whole worker group in one process: its ranks are threads that add up in rank order."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from scheduler.plan import StepPlan, StepResult
from worker.config import RunnerConfig
from worker.kept_weights import WeightKeeper
from worker.launched_step import LaunchedStep
from worker.memory import Capacity
from worker.parallel import SingleRank
from worker.pipeline import NUM_ON_THEIR_WAY, Pipes
from worker.runner import ModelRunner

Answer = TypeVar("Answer")


class _Meeting:
    """What the ranks of one group bring to a collective."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.brought: list[Tensor | None] = [None] * size


class ThreadCommunicator:
    """`worker.parallel.Communicator` between threads."""

    native_all_reduce: tuple[int | None, int | None] = (None, None)

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank, self.size, self._meeting = rank, size, meeting

    def start_step(self, step: int) -> None:
        pass

    def all_reduce(self, tensor: Tensor) -> Tensor:
        brought = self._exchange(tensor)
        total = brought[0].float()
        for part in brought[1:]:
            total = total + part.float()
        return total.to(tensor.dtype)

    def gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor | None:
        assert tensor.shape[1] == widths[self.rank]
        brought = self._exchange(tensor)
        return torch.cat(brought, dim=1) if self.rank == 0 else None

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        brought = self._exchange(tensor)
        assert brought[source].shape == tensor.shape
        assert brought[source].dtype == tensor.dtype
        return brought[source].clone()

    def close(self) -> None:
        pass

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._meeting.brought[self.rank] = tensor.clone()
        self._meeting.barrier.wait()
        brought = [part for part in self._meeting.brought if part is not None]
        assert len(brought) == self.size
        self._meeting.barrier.wait()
        return brought


def only_answer(results: Sequence[StepResult | None], answering: int) -> StepResult:
    """What the rank `answering` said; the others must say nothing."""
    assert [result is not None for result in results] == [
        rank == answering for rank in range(len(results))
    ]
    answer = results[answering]
    assert answer is not None
    return answer


class ThreadPipe:
    """`worker.pipeline.Pipe` between threads."""

    def __init__(self, outgoing: "queue.Queue[Tensor]", incoming: "queue.Queue[Tensor]") -> None:
        self._outgoing, self._incoming = outgoing, incoming

    def start_step(self, step: int) -> None:
        pass

    def send(self, tensor: Tensor) -> None:
        self._outgoing.put(tensor.clone(), timeout=60)

    def receive(self, into: Tensor) -> None:
        came = self._incoming.get(timeout=60)
        assert (came.shape, came.dtype) == (into.shape, into.dtype)
        into.copy_(came)

    def close(self) -> None:
        pass


def _make_pipes(tp: int, pp: int) -> list[Pipes]:
    """Of all ranks, stage after stage."""
    before: list[ThreadPipe | None] = [None] * tp
    pipes = []
    for stage in range(pp):
        after: list[ThreadPipe | None] = [None] * tp
        following: list[ThreadPipe | None] = [None] * tp
        for place in range(tp if stage + 1 < pp else 0):
            there: queue.Queue[Tensor] = queue.Queue(NUM_ON_THEIR_WAY)
            back: queue.Queue[Tensor] = queue.Queue(NUM_ON_THEIR_WAY)
            after[place], following[place] = ThreadPipe(there, back), ThreadPipe(back, there)
        pipes += [Pipes(before[place], after[place]) for place in range(tp)]
        before = following
    return pipes


class WorkerGroup:
    """The runners of all ranks, called together. A context: leaving it closes them."""

    def __init__(
        self,
        model_dir: Path,
        *,
        tp: int = 1,
        pp: int = 1,
        keepers: Sequence[WeightKeeper | None] = (),
        **settings: object,
    ) -> None:
        """`keepers`: by rank, who keeps its weights."""
        defaults: dict[str, object] = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 1024,
            "num_kv_blocks": 64,
        }
        meetings = [_Meeting(tp) for _ in range(pp)]
        pipes = _make_pipes(tp, pp)
        self.runners = [
            ModelRunner(
                RunnerConfig(
                    model_dir=model_dir,
                    tensor_parallel_size=tp,
                    pipeline_parallel_size=pp,
                    rank=rank,
                    **{**defaults, **settings},  # type: ignore[arg-type]  # a test's own words
                ),
                SingleRank()
                if tp == 1
                else ThreadCommunicator(rank % tp, tp, meetings[rank // tp]),
                pipes[rank],
                keepers[rank] if keepers else None,
            )
            for rank in range(tp * pp)
        ]
        self.answering = tp * (pp - 1)
        """The rank that answers"""
        self._threads = ThreadPoolExecutor(tp * pp)

    def __enter__(self) -> "WorkerGroup":
        return self

    def __exit__(self, *exc_info: object) -> None:
        for runner in self.runners:
            runner.close()
        self._threads.shutdown()

    def load(self) -> None:
        self._together(lambda runner: runner.load())

    def measure(self) -> list[Capacity]:
        """What each rank says."""
        return self._together(lambda runner: runner.measure())

    def start(self) -> Capacity:
        """Load, measure and allocate; the least capacity of all ranks."""
        self.load()
        capacity = min(self.measure(), key=lambda one: one.num_blocks)
        self._together(lambda runner: runner.allocate(capacity.num_blocks))
        return capacity

    def reset(self) -> None:
        self._together(lambda runner: runner.reset())

    def execute(self, plan: StepPlan) -> StepResult:
        return self.finish(self.begin(plan))

    def begin(self, plan: StepPlan) -> list[LaunchedStep]:
        """What each rank has launched."""
        return self._together(lambda runner: runner.begin(plan))

    def finish(self, steps: list[LaunchedStep]) -> StepResult:
        return only_answer([step.finish() for step in steps], self.answering)

    def _together(self, call: Callable[[ModelRunner], Answer]) -> list[Answer]:
        return list(self._threads.map(call, self.runners))
