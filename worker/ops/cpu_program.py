"""A forward pass on a CPU, written down once and run for every step.

What CUDA graphs are to GPUs: model code runs once, while recording, over buffers that are large
enough for any step, and leaves a list of native operations that name those buffers. A step then
costs one call, and the computing threads pass from operation to operation by themselves.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from worker.ops.cpu import CpuOperations, fill
from worker.ops.native.structs import Batch, Rows, pointer
from worker.ops.native.team import as_array
from worker.ops.table import BatchInputs

Forward = Callable[[BatchInputs, Tensor], Tensor]
"""(batch, wanted rows) to [number of rows, hidden], `Operations.begin_step` included."""


class StepProgram:
    """The recorded forward pass of one rank. Every rank of a group records and runs the same."""

    def __init__(
        self, ops: CpuOperations, forward: Forward, max_tokens: int, block_size: int
    ) -> None:
        """Record. Nothing is computed yet.

        Args:
            max_tokens: of a step. More: larger buffers, some ten kilobytes per token.
        """
        self._ops, self._block_size = ops, block_size
        self._max_tokens = max_tokens
        with ops.recording(max_tokens) as recording:
            self._hidden = forward(_empty_batch(max_tokens), torch.empty(max_tokens).long())
        self._operations = as_array(recording.operations)
        self._recording = recording
        self._batch = Batch()

    def run(self, batch: BatchInputs, rows: Tensor | None) -> Tensor:
        """Compute one step.

        Shapes:
            rows: [R] int64, the tokens whose hidden states are wanted; None: those of all, if
                what was recorded leaves none out
        Returns:
            [R, hidden], until the next run
        """
        assert batch.num_tokens <= self._max_tokens, f"{batch.num_tokens} tokens"
        num_rows = batch.num_tokens if rows is None else rows.shape[0]
        fill(self._batch, batch, self._block_size)
        self._batch.num_wanted, self._batch.wanted = num_rows, pointer(rows)
        reached = self._ops.team.run(self._operations, self._batch)
        while reached < len(self._operations):
            self._sum(reached, batch.num_tokens, num_rows)
            reached = self._ops.team.run(self._operations, self._batch, reached + 1)
        return self._hidden[:num_rows]

    def _sum(self, index: int, num_tokens: int, num_rows: int) -> None:
        """Complete an all-reduce that the native side left to us, or could not finish."""
        communicator, partial, rows = self._recording.sums[index]
        own = partial[: num_rows if rows is Rows.WANTED else num_tokens]
        if not own.shape[0]:
            return
        total = communicator.all_reduce(own)
        if total.data_ptr() != own.data_ptr():
            own.copy_(total)


def _empty_batch(max_tokens: int) -> BatchInputs:
    """Shapes alone count while recording."""
    longs, ints = torch.empty(max_tokens).long(), torch.empty(max_tokens + 1).int()
    return BatchInputs(
        token_ids=longs,
        positions=longs,
        cells=longs,
        slice_offsets=ints,
        block_tables=ints[:, None],
        context_lens=ints[1:],
        max_slice_len=max_tokens,
        max_context_len=max_tokens,
    )
