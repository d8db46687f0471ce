"""silu(gate) * up of a fused projection."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDTH = 1024


@triton.jit
def gated_silu_kernel(out, gate_up, stride, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < COLUMNS
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + COLUMNS + column, mask=inside, other=0.0)
    small = tl.exp(-tl.abs(gate))  # at most 1, where exp(-gate) would overflow
    sigmoid = tl.where(gate >= 0.0, 1.0, small) / (1.0 + small)
    value = gate * sigmoid * up.to(tl.float32)
    tl.store(out + row * COLUMNS + column, value, mask=inside)


def gated_silu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, [T, columns] of [T, 2 * columns]; computed in float32."""
    num_rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, columns), dtype=gate_up.dtype, device=gate_up.device)
    grid = (num_rows, triton.cdiv(columns, _WIDTH))
    gated_silu_kernel[grid](
        out,
        gate_up,
        gate_up.stride(0),
        COLUMNS=columns,
        WIDTH=_WIDTH,
        enable_fp_fusion=False,
    )
    return out
