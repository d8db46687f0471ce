"""The fast set for CPUs: our own kernels (worker/ops/native/kernels), through their C interface.

Activations are float32 whatever the weights are: 16-bit and int8 weights save memory traffic,
not arithmetic. An operation is done at once, or written down, while `recording`, for a
`worker.ops.cpu_program.StepProgram` to run again and again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from worker.ops.native.structs import (
    ActivationArgs,
    AllReduceArgs,
    Args,
    AttentionArgs,
    Batch,
    Code,
    EmbeddingArgs,
    HeadsShape,
    LinearArgs,
    NormArgs,
    Operation,
    RotateArgs,
    Rows,
    TakeRowsArgs,
    operation,
    pointer,
)
from worker.ops.native.team import FORMATS, Team, as_array
from worker.ops.table import AttentionShape, BatchInputs, HeadNorms, Linear
from worker.parallel import Communicator


@dataclass(slots=True)
class Recording:
    """Operations that were written down instead of done, and what they work on."""

    max_rows: int
    operations: list[Operation] = field(default_factory=list)
    sums: dict[int, tuple[Communicator, Tensor, Rows]] = field(default_factory=dict)
    """By index of the operation, what is summed over the ranks."""
    buffers: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """Results by kind and width, [max_rows, width]: the next one of a kind overwrites the last."""
    wanted: set[int] = field(default_factory=set)
    """Where results begin that have a row for each wanted token, not for each token."""
    kept: list[Tensor] = field(default_factory=list)
    """What the operations read beside that."""


class CpuOperations:
    """`worker.ops.table.Operations` for CPUs."""

    name = "cpu"

    def __init__(
        self, num_threads: int = 1, level: str | None = None, *, is_int8: bool = False
    ) -> None:
        """Start the threads.

        Args:
            level: of instruction sets; None is the best of this machine.
            is_int8: quantize the weights of linear layers.
        """
        self.team = Team(num_threads, level)
        self._is_int8 = is_int8
        self._recording: Recording | None = None
        self._batch = Batch()
        self._inputs: BatchInputs | None = None

    def activation_dtype(self, weights: torch.dtype) -> torch.dtype:
        return torch.float32

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        dtype = torch.int8 if self._is_int8 else weight.dtype
        packed = self.team.pack(weight, dtype)
        return Linear(packed, bias, weight.shape[0], weight.shape[1], dtype, is_packed=True)

    def pack_embedding(self, table: Tensor) -> Linear:
        return Linear(table, None, table.shape[0], table.shape[1], table.dtype)

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        out = self._result("linear", x, linear.out_features)
        scratch = self._scratch(x.shape[0], linear)
        args = LinearArgs(
            pointer(x),
            pointer(linear.weight),
            pointer(linear.bias),
            pointer(out),
            linear.in_features,
            linear.out_features,
            FORMATS[linear.dtype],
            self._rows_of(x),
            pointer(scratch),
        )
        self._do(Code.LINEAR, args, x.shape[0])
        return out

    def embedding(self, token_ids: Tensor, table: Linear, first_id: int) -> Tensor:
        out = self._result("embedding", token_ids, table.in_features)
        args = EmbeddingArgs(
            pointer(table.weight),
            pointer(out),
            first_id,
            table.out_features,
            table.in_features,
            FORMATS[table.dtype],
            table.is_packed,
        )
        self._do(Code.EMBEDDING, args, token_ids.shape[0], token_ids=token_ids)
        return out

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        if self._recording is None:
            return x.index_select(0, rows)
        out = self._result(f"rows of {x.data_ptr()}", rows, x.shape[1])
        self._recording.wanted.add(out.data_ptr())
        self._do(Code.TAKE_ROWS, TakeRowsArgs(pointer(x), pointer(out), x.shape[1]), x.shape[0])
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(None, x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, residual, weight, eps)

    def begin_step(self, batch: BatchInputs, shape: AttentionShape, block_size: int) -> None:
        self._inputs = batch  # keeps alive what the pointers name
        fill(self._batch, batch, block_size)

    def rotate_and_store(
        self,
        qkv: Tensor,
        kv: Tensor,
        batch: BatchInputs,
        shape: AttentionShape,
        cos_sin: Tensor,
        norms: HeadNorms | None,
    ) -> Tensor:
        args = RotateArgs(
            pointer(qkv),
            pointer(kv),
            pointer(cos_sin),
            None if norms is None else pointer(norms.q_weight),
            None if norms is None else pointer(norms.k_weight),
            0.0 if norms is None else norms.eps,
            _heads_shape(shape, kv),
        )
        self._do(Code.ROTATE, args, batch.num_tokens, batch=batch)
        heads = qkv.view(qkv.shape[0], -1, shape.head_dim)
        return heads[:, : shape.num_heads]

    def paged_attention(
        self, q: Tensor, kv: Tensor, batch: BatchInputs, shape: AttentionShape, window: int
    ) -> Tensor:
        out = self._result("attention", q, shape.num_heads * shape.head_dim)
        args = AttentionArgs(
            pointer(q), pointer(kv), pointer(out), q.stride(0), window, _heads_shape(shape, kv)
        )
        self._do(Code.ATTENTION, args, batch.num_tokens, batch=batch)
        return out

    def gated_activation(self, gate_up: Tensor) -> Tensor:
        columns = gate_up.shape[1] // 2
        out = self._result("activation", gate_up, columns)
        args = ActivationArgs(pointer(gate_up), pointer(out), columns, self._rows_of(gate_up))
        self._do(Code.ACTIVATION, args, gate_up.shape[0])
        return out

    def all_reduce(self, partial: Tensor, communicator: Communicator) -> Tensor:
        recording = self._recording
        if recording is None:
            return communicator.all_reduce(partial)
        reduce, group = communicator.native_all_reduce
        args = AllReduceArgs(
            reduce, group, pointer(partial), partial.shape[1], self._rows_of(partial)
        )
        recording.sums[len(recording.operations)] = (communicator, partial, self._rows_of(partial))
        self._do(Code.ALL_REDUCE, args, partial.shape[0])
        return partial

    @contextmanager
    def recording(self, max_rows: int) -> Iterator[Recording]:
        """Write operations down instead of doing them, for steps of up to `max_rows` tokens."""
        assert self._recording is None, "already recording"
        self._recording = Recording(max_rows)
        try:
            yield self._recording
        finally:
            self._recording = None

    def _norm(self, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = self._result("norm", residual, residual.shape[1])
        args = NormArgs(
            pointer(x),
            pointer(residual),
            pointer(weight),
            pointer(out),
            residual.shape[1],
            eps,
            self._rows_of(residual),
        )
        self._do(Code.NORM, args, residual.shape[0])
        return out

    def _result(self, kind: str, like: Tensor, width: int) -> Tensor:
        """A tensor for a result with as many rows as `like`."""
        recording = self._recording
        if recording is None:
            return torch.empty((like.shape[0], width))
        if (kind, width) not in recording.buffers:
            recording.buffers[kind, width] = torch.empty((recording.max_rows, width))
        out = recording.buffers[kind, width]
        recording.wanted.discard(out.data_ptr())
        if like.data_ptr() in recording.wanted:
            recording.wanted.add(out.data_ptr())
        return out

    def _scratch(self, rows: int, linear: Linear) -> Tensor | None:
        num_bytes = self.team.linear_scratch_bytes(rows, linear.in_features, linear.dtype)
        if num_bytes == 0:
            return None
        if self._recording is None:
            return torch.empty(num_bytes, dtype=torch.uint8)
        key = ("scratch", num_bytes)
        if key not in self._recording.buffers:
            self._recording.buffers[key] = torch.empty(num_bytes, dtype=torch.uint8)
        return self._recording.buffers[key]

    def _rows_of(self, x: Tensor) -> Rows:
        if self._recording is None or x.data_ptr() not in self._recording.wanted:
            return Rows.TOKENS
        return Rows.WANTED

    def _do(
        self,
        code: Code,
        args: Args,
        num_rows: int,
        *,
        batch: BatchInputs | None = None,
        token_ids: Tensor | None = None,
    ) -> None:
        """Do an operation, or write it down. Outside of a step it knows only its rows."""
        done = operation(code, args)
        if self._recording is not None:
            self._recording.operations.append(done)
            return
        if batch is not None:
            assert self._inputs is batch, "begin_step was called with another batch"
            of_step = self._batch
        else:
            of_step = Batch(num_tokens=num_rows, token_ids=pointer(token_ids))
        self.team.run(as_array([done]), of_step)


def fill(into: Batch, batch: BatchInputs, block_size: int) -> None:
    """Name a batch's tensors, which must stay alive; no row is wanted by itself."""
    into.num_tokens, into.num_slices, into.num_wanted = batch.num_tokens, batch.num_slices, 0
    into.block_size, into.table_width = block_size, batch.block_tables.shape[1]
    into.token_ids = pointer(batch.token_ids)
    into.positions = pointer(batch.positions)
    into.cells = pointer(batch.cells)
    into.slice_offsets = pointer(batch.slice_offsets)
    into.block_tables = pointer(batch.block_tables)
    into.context_lens = pointer(batch.context_lens)


def _heads_shape(shape: AttentionShape, kv: Tensor) -> HeadsShape:
    return HeadsShape(
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        kv.shape[4] * kv.element_size(),
        kv.shape[1],
        FORMATS[kv.dtype],
        shape.scale,
    )
