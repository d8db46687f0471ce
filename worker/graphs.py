"""CUDA graphs of decode steps: one launch replays what would be hundreds.

A graph computes a fixed number of slices of one token each, in fixed buffers. A step takes
the least graph that holds it, is copied into the buffers, and is padded: a padded row has
cell -1 and context length 0, so it writes nothing to the pool and reads nothing of it
(`worker.ops.table.BatchInputs`). Steps that hold a prefill chunk, or more slices than the
largest graph, run without graphs.

All graphs share one memory pool, since only one runs at a time, and are recorded from the
largest to the smallest, so that the smaller ones fit into what the largest has taken. What a
forward pass returns is copied into one buffer of all graphs; else each would keep its own.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from worker.ops.table import BatchInputs

LARGEST_GRAPH = 512
"""Slices. Beyond, launching costs little beside computing."""

Forward = Callable[[BatchInputs], Tensor]
"""[S, width] of a step of S decodes, `Operations.begin_step` included. It may not wait for the
device, and all that differs between steps must come from the batch's tensors."""


class Capture(Protocol):
    """Records what a function launches. A CUDA device, or a fake in tests."""

    def record(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Call `launch` twice, to warm up and to record; return what replays it."""
        ...

    def used_bytes(self) -> int:
        """Of the device, by anybody, without what torch keeps in reserve."""
        ...


class CudaCapture:
    """`Capture` of one CUDA device, into a memory pool of its own: one for each DecodeGraphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, launch: Callable[[], None]) -> Callable[[], None]:
        """The warm-up compiles kernels and makes cuBLAS's workspace for the stream, neither of
        which may happen while recording."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            launch()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog thread asks for events meanwhile; that must not spoil the recording.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            launch()
        return graph.replay

    def used_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of slices to record, rising, so close that at most 7 rows are padding (15 above
    256); the last one holds `max_num_seqs`, unless that is above LARGEST_GRAPH."""
    largest = min(max_num_seqs, LARGEST_GRAPH)
    steps = (1, 2, 4, *range(8, 256, 8), *range(256, LARGEST_GRAPH, 16))
    return (*(size for size in steps if size < largest), largest)


class DecodeGraphs:
    """The recorded decode steps of one rank. Every rank of a group records and runs the same."""

    def __init__(
        self,
        forward: Forward,
        *,
        sizes: tuple[int, ...],
        max_context_len: int,
        max_blocks: int,
        device: torch.device,
        capture: Capture,
    ) -> None:
        """Make the buffers. Nothing is recorded yet.

        Args:
            sizes: of the graphs, rising (`graph_sizes`).
            max_context_len: of any sequence. More: larger scratch in each attention.
            max_blocks: columns of the block tables.
        """
        assert list(sizes) == sorted(set(sizes)), f"graph sizes must rise, got {sizes}"
        self._forward = forward
        self._capture = capture
        self._sizes = sizes
        self._max_context_len = max_context_len
        rows = sizes[-1]
        self._token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._cells = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self._slice_offsets = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._block_tables = torch.zeros((rows, max_blocks), dtype=torch.int32, device=device)
        self._context_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._num_filled = 0
        self._out: Tensor | None = None
        self._replays: dict[int, Callable[[], None]] = {}

    @property
    def buffer_bytes(self) -> int:
        """Of the buffers for inputs."""
        buffers = (
            self._token_ids,
            self._positions,
            self._cells,
            self._slice_offsets,
            self._block_tables,
            self._context_lens,
        )
        return sum(buffer.nbytes for buffer in buffers)

    @torch.inference_mode()
    def record(self) -> int:
        """Record all graphs; the bytes that they and the buffers have taken.

        Every rank of the group calls this together: collectives are recorded too.
        """
        before = self._capture.used_bytes()
        gc.collect()
        # torch collects garbage before each recording: let it not look at all the rest again.
        gc.freeze()
        try:
            for size in reversed(self._sizes):
                self._record(size)
        finally:
            gc.unfreeze()
        return self.buffer_bytes + self._capture.used_bytes() - before

    @torch.inference_mode()
    def estimate(self) -> int:
        """The bytes that `record` would take, judged by the two largest graphs.

        For a forward pass over a small pool, before the real one is made, since graphs hold
        the addresses of the tensors that they use. Every rank calls this together.
        """
        before = self._capture.used_bytes()
        self._record(self._sizes[-1])
        after_largest = self._capture.used_bytes()
        taken = after_largest - before
        if len(self._sizes) > 1:
            self._record(self._sizes[-2])
            each = max(0, self._capture.used_bytes() - after_largest)
            taken += each * (len(self._sizes) - 1)
        self._replays.clear()
        self._out = None
        return self.buffer_bytes + max(0, taken)

    @torch.inference_mode()
    def run(self, batch: BatchInputs) -> Tensor | None:
        """What the forward pass returns for this step, or None if no graph is for it.

        Returns:
            [S, width]: a view of a buffer that the next call overwrites
        """
        size = self.size_for(batch)
        if size is None:
            return None
        self._fill(batch)
        self._replays[size]()
        assert self._out is not None
        return self._out[: batch.num_slices]

    def size_for(self, batch: BatchInputs) -> int | None:
        """Of the least recorded graph that holds the step; None if the step needs none."""
        if batch.max_slice_len != 1 or batch.num_slices == 0:
            return None
        index = bisect_left(self._sizes, batch.num_slices)
        if index == len(self._sizes) or self._sizes[index] not in self._replays:
            return None
        return self._sizes[index]

    def _record(self, size: int) -> None:
        batch = self._padded(size)
        if self._out is None:
            self._out = torch.empty_like(self._forward(batch))
        out = self._out[:size]

        def launch() -> None:
            out.copy_(self._forward(batch))

        self._replays[size] = self._capture.record(launch)

    def _padded(self, size: int) -> BatchInputs:
        """The first `size` rows of the buffers, as the forward pass sees them."""
        return BatchInputs(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            cells=self._cells[:size],
            slice_offsets=self._slice_offsets[: size + 1],
            block_tables=self._block_tables[:size],
            context_lens=self._context_lens[:size],
            max_slice_len=1,
            max_context_len=self._max_context_len,
        )

    def _fill(self, batch: BatchInputs) -> None:
        """Copy the step into the first rows, and make padding of those that held more before.

        A padded row keeps the token and position of an earlier step: any valid ones will do.
        """
        count = batch.num_slices
        width = batch.block_tables.shape[1]
        assert width <= self._block_tables.shape[1], f"a block table of {width} columns"
        assert batch.max_context_len <= self._max_context_len
        self._token_ids[:count].copy_(batch.token_ids, non_blocking=True)
        self._positions[:count].copy_(batch.positions, non_blocking=True)
        self._cells[:count].copy_(batch.cells, non_blocking=True)
        self._block_tables[:count, :width].copy_(batch.block_tables, non_blocking=True)
        self._context_lens[:count].copy_(batch.context_lens, non_blocking=True)
        if count < self._num_filled:
            self._cells[count : self._num_filled].fill_(-1)
            self._context_lens[count : self._num_filled].fill_(0)
        self._num_filled = count
