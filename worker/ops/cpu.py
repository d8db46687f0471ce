"""The fast set for CPUs, in plain torch: few calls, no copies of the cache that can be avoided.

Linear layers use oneDNN with weights packed once (2.4 times torch's own at 8 rows in float32
on Zen 3). It compiles and keeps a kernel for every number of rows it meets (half a millisecond
and half a megabyte each), so rows are filled up to one of a few numbers. Attention is planned
once per step and window: decodes of similar length form one batch, slices of several tokens
run one by one in pieces of rows.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.ops.cpu_attention import AttentionPlan, plan_attention
from worker.ops.table import AttentionShape, BatchInputs, HeadNorms, Linear

PACKED_FOR_ROWS = 64
"""Rows of input that oneDNN lays a weight out for; measured best, or as good, for 1 to 512."""


@dataclass(slots=True)
class _Step:
    """What is derived from one batch, once instead of in each layer."""

    batch: BatchInputs
    block_size: int
    plans: dict[int, AttentionPlan]
    """By window."""
    cos: Tensor | None = None
    """[T, 1, 1, head_dim / 2], the cosine of both halves"""
    sin: Tensor | None = None
    """[T, 1, 2, head_dim / 2], minus the sine, then the sine"""


class CpuOperations:
    """`worker.ops.table.Operations` for CPUs. Bound to one step at a time by `begin_step`."""

    name = "cpu"

    def __init__(self) -> None:
        self._step: _Step | None = None
        self._eps: dict[float, Tensor] = {}

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if _packs(weight.dtype):
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
            return Linear(packed, bias, weight.shape[0])
        return Linear(weight, bias, weight.shape[0])

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        weight = linear.weight
        if not weight.is_mkldnn:
            return F.linear(x, weight, linear.bias)
        rows = x.shape[0]
        filled = filled_rows(rows)
        if filled != rows:
            x = F.pad(x, (0, 0, 0, filled - rows))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, linear.bias, "none", [], "")
        return out if filled == rows else out[:rows]

    def embedding(self, token_ids: Tensor, table: Tensor, first_id: int) -> Tensor:
        local = token_ids - first_id if first_id else token_ids
        is_elsewhere = local >= table.shape[0]
        if first_id:
            is_elsewhere |= local < 0
        rows = torch.embedding(table, local.masked_fill(is_elsewhere, 0))
        return rows.masked_fill_(is_elsewhere[:, None], 0.0)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype != torch.float32:
            return self._normed(x.float(), eps).mul_(weight.float()).to(x.dtype)
        return self._normed(x, eps).mul_(weight)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.rms_norm(residual.add_(x), weight, eps)

    def begin_step(self, batch: BatchInputs, shape: AttentionShape, block_size: int) -> None:
        self._step = _Step(batch, block_size, {})

    def rotate_and_store(
        self,
        qkv: Tensor,
        kv: Tensor,
        batch: BatchInputs,
        shape: AttentionShape,
        cos_sin: Tensor,
        norms: HeadNorms | None,
    ) -> Tensor:
        step = self._step_of(batch)
        if step.cos is None or step.sin is None:
            cos, sin = cos_sin.index_select(0, batch.positions)[:, None, None].chunk(2, dim=-1)
            step.cos, step.sin = cos, torch.cat((-sin, sin), dim=-2)
        num_heads, num_kv, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv, 2, head_dim // 2)
        turning = heads[:, : num_heads + num_kv]
        if norms is not None:
            turning = self._norm_heads(turning, num_heads, norms)
        elif qkv.dtype != torch.float32:
            turning = turning.float()
        turned = turning * step.cos
        turned = turned.addcmul_(turning.flip(2), step.sin).to(qkv.dtype).flatten(2)
        k, v = turned[:, num_heads:], heads[:, num_heads + num_kv :].flatten(2)
        by_cell = kv.view(2, -1, num_kv, head_dim)
        by_cell[0].index_copy_(0, batch.cells, k)
        by_cell[1].index_copy_(0, batch.cells, v)
        return turned[:, :num_heads]

    def paged_attention(
        self, q: Tensor, kv: Tensor, batch: BatchInputs, shape: AttentionShape, window: int
    ) -> Tensor:
        step = self._step_of(batch)
        plan = step.plans.get(window)
        if plan is None:
            plan = plan_attention(batch, step.block_size, kv.shape[1], window, q.dtype)
            step.plans[window] = plan
        return plan.attend(q, kv, shape)

    def gated_activation(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def _step_of(self, batch: BatchInputs) -> _Step:
        assert self._step is not None, "begin_step comes before the layers"
        assert self._step.batch is batch, "begin_step was called with another batch"
        return self._step

    def _norm_heads(self, heads: Tensor, num_heads: int, norms: HeadNorms) -> Tensor:
        """[T, H, 2, head_dim / 2] in float32, query heads, then key heads."""
        normed = self._normed(heads.flatten(2).float(), norms.eps)
        normed[:, :num_heads] *= norms.q_weight.float()
        normed[:, num_heads:] *= norms.k_weight.float()
        return normed.view(heads.shape)

    def _normed(self, x: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) of float32, as a new tensor."""
        added = self._eps.get(eps)
        if added is None:
            added = self._eps[eps] = torch.tensor(eps)
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        # One call for square, divide and add: a call costs more than its arithmetic.
        return x * torch.addcmul(added, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()


def filled_rows(rows: int) -> int:
    """The number of rows that is computed for `rows`: itself up to 16, then one of 8 per
    doubling up to 64, then one of 4 (at most a quarter more)."""
    if rows <= 16:
        return rows
    doubling = (rows - 1).bit_length() - 1
    grain = 1 << (doubling - 3 if rows <= 64 else doubling - 2)
    return -(-rows // grain) * grain


def _packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this type faster than torch; 16-bit types need the hardware."""
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
