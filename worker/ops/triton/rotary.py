"""Norms and rotates query and key heads, and writes K and V to their cells, in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.ops.table import AttentionShape, BatchInputs, HeadNorms

_VALUES_PER_PROGRAM = 2048


@triton.jit
def rotate_and_store_kernel(
    q_out,
    kv,
    qkv,
    positions,
    cells,
    cos_sin,
    q_weight,
    k_weight,
    eps,
    qkv_stride,
    v_rows: tl.int64,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """HEADS heads of one token; query heads go to q_out, K and V heads to the pool."""
    HEAD_DIM: tl.constexpr = 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, HALF_PADDED)
    is_query = head < NUM_HEADS
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (dim < HALF)[None, :]

    source = qkv + token * qkv_stride + head[:, None] * HEAD_DIM + dim[None, :]
    raw_low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    raw_high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    low, high = raw_low, raw_high
    if HAS_NORM:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        inverse = tl.rsqrt(squares / HEAD_DIM + eps)
        low = low * inverse[:, None] * _norm_weight(q_weight, k_weight, is_query, dim, HALF)
        high = (
            high
            * inverse[:, None]
            * _norm_weight(q_weight + HALF, k_weight + HALF, is_query, dim, HALF)
        )

    angles = cos_sin + tl.load(positions + token) * HEAD_DIM + dim
    cos = tl.load(angles, mask=dim < HALF, other=0.0)[None, :]
    sin = tl.load(angles + HALF, mask=dim < HALF, other=0.0)[None, :]
    out_low = tl.where(is_value[:, None], raw_low, low * cos - high * sin)
    out_high = tl.where(is_value[:, None], raw_high, high * cos + low * sin)

    query = q_out + (token * NUM_HEADS + head[:, None]) * HEAD_DIM + dim[None, :]
    to_query = inside & is_query[:, None]
    tl.store(query, out_low, mask=to_query)
    tl.store(query + HALF, out_high, mask=to_query)

    # A padded token has cell -1 and is not stored.
    cell = tl.load(cells + token)
    kv_head = tl.where(is_value, head - NUM_HEADS - NUM_KV_HEADS, head - NUM_HEADS)
    row = cell * NUM_KV_HEADS + kv_head + tl.where(is_value, v_rows, 0)
    target = kv + row[:, None] * HEAD_DIM + dim[None, :]
    to_pool = inside & (tl.where(cell >= 0, head, -1) >= NUM_HEADS)[:, None]
    tl.store(target, out_low, mask=to_pool)
    tl.store(target + HALF, out_high, mask=to_pool)


@triton.jit
def _norm_weight(q_weight, k_weight, is_query, dim, HALF: tl.constexpr):
    q = tl.load(q_weight + dim, mask=dim < HALF, other=0.0).to(tl.float32)
    k = tl.load(k_weight + dim, mask=dim < HALF, other=0.0).to(tl.float32)
    return tl.where(is_query[:, None], q[None, :], k[None, :])


def rotate_and_store(
    qkv: Tensor,
    kv: Tensor,
    batch: BatchInputs,
    shape: AttentionShape,
    cos_sin: Tensor,
    norms: HeadNorms | None,
) -> Tensor:
    """See `worker.ops.table.Operations.rotate_and_store`; qkv is not written.

    The query heads get a buffer of their own: rotating them in place would let a program's
    warps, which hold copies of the same values when a tile is small, read what another of
    them has already written.
    """
    num_tokens = qkv.shape[0]
    half = shape.head_dim // 2
    half_padded = triton.next_power_of_2(half)
    num_all_heads = shape.num_heads + 2 * shape.num_kv_heads
    heads = min(triton.next_power_of_2(num_all_heads), _VALUES_PER_PROGRAM // (2 * half_padded))
    q = torch.empty(
        (num_tokens, shape.num_heads, shape.head_dim), dtype=qkv.dtype, device=qkv.device
    )
    rotate_and_store_kernel[(num_tokens, triton.cdiv(num_all_heads, heads))](
        q,
        kv,
        qkv,
        batch.positions,
        batch.cells,
        cos_sin,
        norms.q_weight if norms else cos_sin,
        norms.k_weight if norms else cos_sin,
        norms.eps if norms else 0.0,
        qkv.stride(0),
        kv.stride(0) // shape.head_dim,
        NUM_HEADS=shape.num_heads,
        NUM_KV_HEADS=shape.num_kv_heads,
        HALF=half,
        HALF_PADDED=half_padded,
        HEADS=heads,
        HAS_NORM=norms is not None,
        enable_fp_fusion=False,
    )
    return q
