"""The oracle: every operation in plain torch, slow and obvious.

Every other set is tested against this one. Whatever the dtype, sums and products of norms,
rotation and attention are float32, rounded once at the end.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.ops.table import AttentionShape, BatchInputs, HeadNorms, Linear
from worker.parallel import Communicator
from worker.window import NO_WINDOW


class ReferenceOperations:
    """`worker.ops.table.Operations`, without state."""

    name = "reference"

    def activation_dtype(self, weights: torch.dtype) -> torch.dtype:
        return weights

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return Linear(weight, bias, weight.shape[0], weight.shape[1], weight.dtype)

    def pack_embedding(self, table: Tensor) -> Linear:
        return self.pack_linear(table, None)

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        return F.linear(x, linear.weight, linear.bias)

    def embedding(self, token_ids: Tensor, table: Linear, first_id: int) -> Tensor:
        local = token_ids - first_id
        is_here = (local >= 0) & (local < table.out_features)
        rows = table.weight[torch.where(is_here, local, 0)]
        return torch.where(is_here[:, None], rows, torch.zeros_like(rows))

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return x[rows]

    def all_reduce(self, partial: Tensor, communicator: Communicator) -> Tensor:
        return communicator.all_reduce(partial)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        mean_square = wide.pow(2).mean(dim=-1, keepdim=True)
        return (wide * torch.rsqrt(mean_square + eps) * weight.float()).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def begin_step(self, batch: BatchInputs, shape: AttentionShape, block_size: int) -> None:
        pass

    def rotate_and_store(
        self,
        qkv: Tensor,
        kv: Tensor,
        batch: BatchInputs,
        shape: AttentionShape,
        cos_sin: Tensor,
        norms: HeadNorms | None,
    ) -> Tensor:
        num_kv, head_dim = shape.num_kv_heads, shape.head_dim
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        q, k, v = heads.tensor_split((shape.num_heads, shape.num_heads + num_kv), dim=1)
        if norms is not None:
            q = self.rms_norm(q, norms.q_weight, norms.eps)
            k = self.rms_norm(k, norms.k_weight, norms.eps)
        angles = cos_sin[batch.positions]
        q, k = _rotate(q, angles), _rotate(k, angles)
        is_real = batch.cells >= 0
        cells = batch.cells[is_real]
        kv.view(2, -1, num_kv, head_dim)[0, cells] = k[is_real].to(kv.dtype)
        kv.view(2, -1, num_kv, head_dim)[1, cells] = v[is_real].to(kv.dtype)
        return q

    def paged_attention(
        self, q: Tensor, kv: Tensor, batch: BatchInputs, shape: AttentionShape, window: int
    ) -> Tensor:
        """Materializes one score matrix per slice, so O(slice * context) memory."""
        out = torch.zeros_like(q)
        offsets = batch.slice_offsets.tolist()
        for index, context_len in enumerate(batch.context_lens.tolist()):
            if context_len == 0:
                continue
            tokens = slice(offsets[index], offsets[index + 1])
            num_blocks = -(-context_len // kv.shape[2])
            blocks = batch.block_tables[index, :num_blocks]
            k, v = kv[:, blocks].flatten(1, 2)[:, :context_len].float()
            out[tokens] = _attend(q[tokens].float(), k, v, shape, window).to(q.dtype)
        return out.flatten(1)

    def gated_activation(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(gate_up.dtype)


def _rotate(heads: Tensor, angles: Tensor) -> Tensor:
    """heads: [T, H, head_dim]; angles: [T, head_dim], cosines, then sines."""
    cos, sin = angles[:, None, :].chunk(2, dim=-1)
    first, second = heads.float().chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).to(heads.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape, window: int) -> Tensor:
    """One slice, its tokens being the last of the context.

    Shapes (n tokens in the slice, c in the context):
        q: [n, num_heads, head_dim]; k, v: [c, num_kv_heads, head_dim]
    """
    group = shape.num_heads // shape.num_kv_heads
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * shape.scale
    key_positions = torch.arange(k.shape[0], device=q.device)
    distance = key_positions[-q.shape[0] :, None] - key_positions[None, :]
    is_hidden = distance < 0
    if window != NO_WINDOW:
        is_hidden |= distance >= window
    weights = scores.masked_fill(is_hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)
