"""The operations on GPUs: our Triton kernels, and cuBLAS through torch for linear layers.

Runs from Ampere (compute capability 8.0) on, in float16, bfloat16 and float32, and needs no
library but Triton; importing this module imports it, so only choosing this set does. Nothing
waits for the device, and `begin_step` too may be captured into a CUDA graph.

Attention gives a sequence the same bits in any company: how its context is cut into parts
depends on its own length alone (ADR 0010). The linear layers do not promise that, since
cuBLAS chooses its kernels by the number of rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.ops.table import AttentionShape, BatchInputs, HeadNorms, Linear
from worker.ops.triton.activation import gated_silu
from worker.ops.triton.decode import DecodePlan, attend_decodes, plan_decodes
from worker.ops.triton.embedding import embedding
from worker.ops.triton.norm import add_rms_norm, rms_norm
from worker.ops.triton.prefill import attend_chunks
from worker.ops.triton.rotary import rotate_and_store
from worker.parallel import Communicator

MIN_CAPABILITY = (8, 0)
MAX_HEAD_DIM = 256
MAX_GROUP = 128
"""Query heads per K/V head; they share a tile."""
BLOCK_SIZES = (8, 16, 32, 64, 128)


class UnsupportedDevice(RuntimeError):
    """The GPU is older than what these kernels are written for."""

    def __init__(self, name: str, capability: tuple[int, int]) -> None:
        wanted, got = (".".join(map(str, pair)) for pair in (MIN_CAPABILITY, capability))
        super().__init__(
            f"ops 'cuda' need compute capability {wanted} (Ampere) or newer; {name} has {got}. "
            "Use another GPU, or run on the CPU with device='cpu'"
        )


class CudaOperations:
    """`worker.ops.table.Operations` on the current device. Keeps the plans of the step."""

    name = "cuda"

    def __init__(self) -> None:
        """Without any GPU, Triton must be interpreting, and tensors are the CPU's (tests).

        Raises:
            UnsupportedDevice: the GPU is older than Ampere.
        """
        self._num_processors = 1
        self._plans: dict[int, DecodePlan] = {}
        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            capability = (properties.major, properties.minor)
            if capability < MIN_CAPABILITY:
                raise UnsupportedDevice(properties.name, capability)
            self._num_processors = properties.multi_processor_count

    def activation_dtype(self, weights: torch.dtype) -> torch.dtype:
        return weights

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return Linear(weight.contiguous(), bias, weight.shape[0], weight.shape[1], weight.dtype)

    def pack_embedding(self, table: Tensor) -> Linear:
        return self.pack_linear(table, None)

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        return F.linear(x, linear.weight, linear.bias)

    def embedding(self, token_ids: Tensor, table: Linear, first_id: int) -> Tensor:
        return embedding(token_ids, table.weight, first_id)

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return x.index_select(0, rows)

    def all_reduce(self, partial: Tensor, communicator: Communicator) -> Tensor:
        return communicator.all_reduce(partial)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return add_rms_norm(x, residual, weight, eps)

    def begin_step(self, batch: BatchInputs, shape: AttentionShape, block_size: int) -> None:
        """Forget the plans of the step before; a layer that needs one makes it.

        Raises:
            ValueError: a head or block size that the kernels are not made for.
        """
        check_sizes(shape, block_size)
        self._plans.clear()

    def rotate_and_store(
        self,
        qkv: Tensor,
        kv: Tensor,
        batch: BatchInputs,
        shape: AttentionShape,
        cos_sin: Tensor,
        norms: HeadNorms | None,
    ) -> Tensor:
        return rotate_and_store(qkv, kv, batch, shape, cos_sin, norms)

    def paged_attention(
        self, q: Tensor, kv: Tensor, batch: BatchInputs, shape: AttentionShape, window: int
    ) -> Tensor:
        width = shape.num_heads * shape.head_dim
        out = torch.empty((q.shape[0], width), dtype=q.dtype, device=q.device)
        plan = self._plans.get(window)
        if plan is None:
            plan = self._plans[window] = plan_decodes(batch, shape, window, q.dtype)
        attend_decodes(out, q, kv, batch, shape, window, plan, self._num_processors)
        if batch.max_slice_len > 1:
            attend_chunks(out, q, kv, batch, shape, window)
        return out

    def gated_activation(self, gate_up: Tensor) -> Tensor:
        return gated_silu(gate_up)


def check_sizes(shape: AttentionShape, block_size: int) -> None:
    """Refuse heads and blocks that the attention kernels are not made for.

    Raises:
        ValueError: names the size and what would do.
    """
    if shape.head_dim % 2 or not 16 <= shape.head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"ops 'cuda' take even head sizes from 16 to {MAX_HEAD_DIM}, the model has "
            f"{shape.head_dim}"
        )
    group = shape.num_heads // shape.num_kv_heads
    if group > MAX_GROUP:
        raise ValueError(
            f"ops 'cuda' take at most {MAX_GROUP} query heads per K/V head, the model has {group}"
        )
    if block_size not in BLOCK_SIZES:
        raise ValueError(
            f"ops 'cuda' take block_size {', '.join(map(str, BLOCK_SIZES))}, got {block_size}"
        )
