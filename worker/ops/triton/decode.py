"""Attention of decodes, one query token per sequence, over parts of the paged context.

A program takes a part of one sequence's context (`worker.ops.triton.splits`) and one K/V
head, whose keys and values it reads once for all of the head's queries. Partial softmaxes of
sequences with several parts are joined by a second kernel. Slices of several tokens are left
to `worker.ops.triton.prefill`.

Source: online softmax, Milakov and Gimelshein 2018 (arXiv:1805.02867); its use in attention,
Dao et al. 2022 (arXiv:2205.14135); parts, see `splits`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.ops.table import AttentionShape, BatchInputs
from worker.ops.triton.splits import (
    MIN_SPLIT,
    bound_splits,
    max_splits,
    plan_kernel,
    split_length,
    visible_tokens,
)
from worker.ops.triton.tiles import LOG2_E, DecodeTiles, decode_tiles
from worker.window import NO_WINDOW

_PLAN_SLICES = 128
_PROGRAMS_PER_PROCESSOR = 4


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The parts of all decodes of one step, for layers of one window."""

    items: Tensor
    """[1 + S * bound] int32, see `plan_kernel`"""
    most_splits: int
    """The shard's most parts of one sequence; a power of two"""
    bound: int
    """No sequence of this step has more"""
    tiles: DecodeTiles


def plan_decodes(
    batch: BatchInputs, shape: AttentionShape, window: int, dtype: torch.dtype
) -> DecodePlan:
    """Cut the contexts of all slices of one token. One launch, no wait for the device."""
    max_visible = batch.max_context_len
    if window != NO_WINDOW:
        max_visible = min(max_visible, window)
    most = max_splits(shape.num_kv_heads)
    bound = bound_splits(max_visible, most)
    tiles = decode_tiles(dtype, shape)
    items = torch.empty(
        1 + batch.num_slices * bound, dtype=torch.int32, device=batch.context_lens.device
    )
    plan_kernel[(1,)](
        items,
        batch.context_lens,
        batch.slice_offsets,
        batch.num_slices,
        window,
        MIN_SPLIT=MIN_SPLIT,
        MAX_SPLITS=most,
        TILE=tiles.keys,
        SLICES=_PLAN_SLICES,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return DecodePlan(items, most, bound, tiles)


@triton.jit(do_not_specialize=["table_stride", "window", "bound"])
def decode_kernel(
    out,
    partial_out,
    partial_sums,
    q,
    kv,
    items,
    block_tables,
    context_lens,
    slice_offsets,
    scale_log2,
    window,
    bound,
    q_stride,
    table_stride,
    v_offset: tl.int64,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Programs (i, h) take items i, i + programs, ... of K/V head h.

    Scores are kept in units of log2, so that exp2, the hardware's own, does the softmax.
    """
    kv_head = tl.program_id(1)
    query = tl.arange(0, GROUP_PADDED)
    dim = tl.arange(0, HEAD_PADDED)
    in_query = (query < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    num_items = tl.load(items)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        packed = tl.load(items + 1 + item)
        row = packed // MAX_SPLITS
        part = packed % MAX_SPLITS
        context_len = tl.load(context_lens + row)
        token = tl.load(slice_offsets + row).to(tl.int64)
        visible = visible_tokens(context_len, window)
        length = split_length(visible, MIN_SPLIT, MAX_SPLITS, TILE)
        first = context_len - visible + part * length
        end = tl.minimum(first + length, context_len)

        heads = kv_head * GROUP + query
        lanes = heads[:, None] * HEAD_DIM + dim[None, :]
        queries = tl.load(q + token * q_stride + lanes, mask=in_query, other=0.0)
        table = block_tables + row.to(tl.int64) * table_stride
        best = tl.full([GROUP_PADDED], float("-inf"), dtype=tl.float32)
        total = tl.zeros([GROUP_PADDED], dtype=tl.float32)
        mixed = tl.zeros([GROUP_PADDED, HEAD_PADDED], dtype=tl.float32)
        for position in range(first, end, TILE):
            key = position + tl.arange(0, TILE)
            inside = key < end
            block = tl.load(table + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            cell = block * BLOCK_SIZE + key % BLOCK_SIZE
            source = kv + (cell * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dim[None, :]
            if HEAD_DIM == HEAD_PADDED:
                is_real = inside[:, None]
            else:
                is_real = inside[:, None] & (dim < HEAD_DIM)[None, :]
            keys = tl.load(source, mask=is_real, other=0.0)
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale_log2
            scores = tl.where(inside[None, :], scores, float("-inf"))
            # Never -inf: the first key of each part is visible.
            new_best = tl.maximum(best, tl.max(scores, 1))
            weights = tl.exp2(scores - new_best[:, None])
            shrink = tl.exp2(best - new_best)
            total = total * shrink + tl.sum(weights, 1)
            values = tl.load(source + v_offset, mask=is_real, other=0.0)
            mixed = tl.dot(
                weights.to(values.dtype), values, mixed * shrink[:, None], input_precision="ieee"
            )
            best = new_best

        if visible <= length:
            # All of it; a padded decode saw nothing and yields zeros.
            mixed = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
            done = out + token * (NUM_KV_HEADS * GROUP * HEAD_DIM) + lanes
            tl.store(done, mixed, mask=in_query)
        else:
            place = (row.to(tl.int64) * bound + part) * (NUM_KV_HEADS * GROUP) + heads
            partial = partial_out + place[:, None] * HEAD_DIM + dim[None, :]
            tl.store(partial, mixed, mask=in_query)
            tl.store(partial_sums + 2 * place, best, mask=query < GROUP)
            tl.store(partial_sums + 2 * place + 1, total, mask=query < GROUP)


@triton.jit(do_not_specialize=["window", "bound"])
def join_kernel(
    out,
    partial_out,
    partial_sums,
    context_lens,
    slice_offsets,
    window,
    bound,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Join the parts of one slice for the queries of one K/V head, if it has several."""
    row = tl.program_id(0)
    token = tl.load(slice_offsets + row)
    is_decode = tl.load(slice_offsets + row + 1) - token == 1
    visible = visible_tokens(tl.load(context_lens + row), window)
    length = split_length(visible, MIN_SPLIT, MAX_SPLITS, TILE)
    if is_decode and visible > length:
        part = tl.arange(0, MAX_SPLITS)
        dim = tl.arange(0, HEAD_PADDED)
        is_part = part < (visible + length - 1) // length
        first = row.to(tl.int64) * bound
        for query in range(GROUP):
            head = tl.program_id(1) * GROUP + query
            place = (first + part) * (NUM_KV_HEADS * GROUP) + head
            best = tl.load(partial_sums + 2 * place, mask=is_part, other=float("-inf"))
            total = tl.load(partial_sums + 2 * place + 1, mask=is_part, other=0.0)
            share = tl.exp2(best - tl.max(best, 0))
            mixed = tl.load(
                partial_out + place[:, None] * HEAD_DIM + dim[None, :],
                mask=is_part[:, None] & (dim < HEAD_DIM)[None, :],
                other=0.0,
            )
            joined = tl.sum(mixed * share[:, None], 0) / tl.sum(total * share, 0)
            target = out + (token.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM + dim
            tl.store(target, joined, mask=dim < HEAD_DIM)


def attend_decodes(
    out: Tensor,
    q: Tensor,
    kv: Tensor,
    batch: BatchInputs,
    shape: AttentionShape,
    window: int,
    plan: DecodePlan,
    num_processors: int,
) -> None:
    """Write the rows of `out`, [T, num_heads * head_dim], that belong to slices of one token.

    Scratch: 4 * (head_dim + 2) bytes per query head and part, for `plan.bound` parts of each
    slice; none where no context is longer than MIN_SPLIT.
    """
    num_slices = batch.num_slices
    num_partials = num_slices * plan.bound * shape.num_heads if plan.bound > 1 else 0
    partial_out = torch.empty(
        max(1, num_partials * shape.head_dim), dtype=torch.float32, device=q.device
    )
    partial_sums = torch.empty(max(1, 2 * num_partials), dtype=torch.float32, device=q.device)
    group = shape.num_heads // shape.num_kv_heads
    head_padded = triton.next_power_of_2(shape.head_dim)
    tiles = plan.tiles
    wanted = triton.cdiv(_PROGRAMS_PER_PROCESSOR * num_processors, shape.num_kv_heads)
    programs = max(num_slices, min(num_slices * plan.bound, wanted))
    decode_kernel[(programs, shape.num_kv_heads)](
        out,
        partial_out,
        partial_sums,
        q,
        kv,
        plan.items,
        batch.block_tables,
        batch.context_lens,
        batch.slice_offsets,
        shape.scale * LOG2_E,
        window,
        plan.bound,
        q.stride(0),
        batch.block_tables.stride(0),
        kv.stride(0),
        NUM_KV_HEADS=shape.num_kv_heads,
        GROUP=group,
        GROUP_PADDED=tiles.queries,
        HEAD_DIM=shape.head_dim,
        HEAD_PADDED=head_padded,
        BLOCK_SIZE=kv.shape[2],
        TILE=tiles.keys,
        MIN_SPLIT=MIN_SPLIT,
        MAX_SPLITS=plan.most_splits,
        num_warps=tiles.num_warps,
        enable_fp_fusion=False,
        num_stages=tiles.num_stages,
    )
    if plan.bound == 1:
        return
    join_kernel[(num_slices, shape.num_kv_heads)](
        out,
        partial_out,
        partial_sums,
        batch.context_lens,
        batch.slice_offsets,
        window,
        plan.bound,
        NUM_KV_HEADS=shape.num_kv_heads,
        GROUP=group,
        HEAD_DIM=shape.head_dim,
        HEAD_PADDED=head_padded,
        TILE=tiles.keys,
        MIN_SPLIT=MIN_SPLIT,
        MAX_SPLITS=plan.most_splits,
        num_warps=4 if shape.head_dim <= 128 else 8,
        enable_fp_fusion=False,
    )
