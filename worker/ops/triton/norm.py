"""RMS norm of rows, alone and with the addition to the residual stream before it."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rms_norm_kernel(out, x, weight, eps, x_stride, HIDDEN: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < HIDDEN
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + eps)
    tl.store(out + row * HIDDEN + column, value * inverse * scale, mask=inside)


@triton.jit
def add_rms_norm_kernel(
    out,
    residual,
    x,
    weight,
    eps,
    x_stride,
    residual_stride,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < HIDDEN
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    stream = residual + row * residual_stride + column
    value += tl.load(stream, mask=inside, other=0.0).to(tl.float32)
    # The norm is of the stream as it is kept, rounded to its dtype, as torch adds it.
    kept = value.to(residual.dtype.element_ty)
    tl.store(stream, kept, mask=inside)
    value = kept.to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + eps)
    tl.store(out + row * HIDDEN + column, value * inverse * scale, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The RMS norm of each row of x, [T, hidden], in x's dtype; x is not written."""
    num_rows, hidden = x.shape
    out = torch.empty((num_rows, hidden), dtype=x.dtype, device=x.device)
    width = triton.next_power_of_2(hidden)
    rms_norm_kernel[(num_rows,)](
        out,
        x,
        weight,
        eps,
        x.stride(0),
        HIDDEN=hidden,
        WIDTH=width,
        num_warps=_num_warps(width),
        enable_fp_fusion=False,
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to residual in place; the RMS norm of the sum, [T, hidden]."""
    num_rows, hidden = x.shape
    out = torch.empty((num_rows, hidden), dtype=x.dtype, device=x.device)
    width = triton.next_power_of_2(hidden)
    add_rms_norm_kernel[(num_rows,)](
        out,
        residual,
        x,
        weight,
        eps,
        x.stride(0),
        residual.stride(0),
        HIDDEN=hidden,
        WIDTH=width,
        num_warps=_num_warps(width),
        enable_fp_fusion=False,
    )
    return out


def _num_warps(width: int) -> int:
    """A warp for each 256 columns: 8 values a thread, up to 16384 columns without spilling."""
    return min(16, max(1, width // 256))
