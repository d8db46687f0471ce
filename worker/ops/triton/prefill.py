"""Attention of prefill chunks, slices of several tokens, over paged K/V.

A program takes a tile of consecutive query tokens of one slice with all query heads of one
K/V head, and walks over the keys that any of them sees, so each key and value is read once
for the whole tile. Tiles of queries are counted from the slice's start and tiles of keys from
the sequence's, so neither a token's batch nor where its chunk was cut changes the order of its
sums. Slices of one token are left to `worker.ops.triton.decode`.

Source: Dao 2023 (arXiv:2307.08691), section 3; paged K/V, Kwon et al. 2023
(arXiv:2309.06180).
"""

import triton
import triton.language as tl
from torch import Tensor

from worker.ops.table import AttentionShape, BatchInputs
from worker.ops.triton.tiles import LOG2_E, prefill_tiles


@triton.jit
def _find_slice(slice_offsets, num_slices, tile, TOKENS: tl.constexpr):
    """The slice that a tile belongs to: the last one whose first tile is not after it.

    Slice s owns the tiles from slice_offsets[s] // TOKENS + s on: at least as many as it
    needs, so that no list of tiles has to be made. Those left over do nothing.
    """
    low = 0
    high = num_slices
    while high - low > 1:
        middle = (low + high) // 2
        first_tile = tl.load(slice_offsets + middle) // TOKENS + middle
        if first_tile <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _attend_tile(
    queries,
    best,
    total,
    mixed,
    kv,
    table,
    kv_head,
    first,
    end,
    position,
    reach,
    scale_log2,
    v_offset,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """One step of the online softmax: keys [first, first + TILE), of which those below `end`
    exist. Without IS_MASKED all exist, and all rows see all of them."""
    dim = tl.arange(0, HEAD_PADDED)
    key = first + tl.arange(0, TILE)
    if IS_MASKED:
        block = tl.load(table + key // BLOCK_SIZE, mask=key < end, other=0).to(tl.int64)
    else:
        block = tl.load(table + key // BLOCK_SIZE).to(tl.int64)
    cell = block * BLOCK_SIZE + key % BLOCK_SIZE
    source = kv + (cell * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dim[None, :]
    is_real = (key < end)[:, None] & (dim < HEAD_DIM)[None, :]
    if IS_MASKED or HEAD_DIM != HEAD_PADDED:
        keys = tl.load(source, mask=is_real, other=0.0)
        values = tl.load(source + v_offset, mask=is_real, other=0.0)
    else:
        keys = tl.load(source)
        values = tl.load(source + v_offset)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale_log2
    if IS_MASKED:
        distance = position[:, None] - key[None, :]
        is_seen = (distance >= 0) & (distance < reach)
        scores = tl.where(is_seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        # A row that has seen nothing yet, below its window, must not make a NaN.
        floor = tl.where(new_best > float("-inf"), new_best, 0.0)
    else:
        new_best = tl.maximum(best, tl.max(scores, 1))
        floor = new_best
    weights = tl.exp2(scores - floor[:, None])
    shrink = tl.exp2(best - floor)
    total = total * shrink + tl.sum(weights, 1)
    mixed = tl.dot(
        weights.to(values.dtype), values, mixed * shrink[:, None], input_precision="ieee"
    )
    return new_best, total, mixed


@triton.jit(do_not_specialize=["num_slices", "table_stride", "window"])
def prefill_kernel(
    out,
    q,
    kv,
    block_tables,
    context_lens,
    slice_offsets,
    num_slices,
    scale_log2,
    window,
    q_stride,
    table_stride,
    v_offset: tl.int64,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    TOKENS: tl.constexpr = ROWS // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = _find_slice(slice_offsets, num_slices, tile, TOKENS)
    offset = tl.load(slice_offsets + row)
    count = tl.load(slice_offsets + row + 1) - offset
    first = (tile - (offset // TOKENS + row)) * TOKENS
    if count > 1 and first < count:
        context_len = tl.load(context_lens + row)
        place = tl.arange(0, ROWS)
        token = first + place // GROUP
        head = kv_head * GROUP + place % GROUP
        position = context_len - count + token
        dim = tl.arange(0, HEAD_PADDED)
        is_row = (place < TOKENS * GROUP) & (token < count)
        is_real = is_row[:, None] & (dim < HEAD_DIM)[None, :]
        lanes = head[:, None] * HEAD_DIM + dim[None, :]
        index = (offset + token).to(tl.int64)
        queries = tl.load(q + index[:, None] * q_stride + lanes, mask=is_real, other=0.0)

        # All rows see the keys below `whole`; the last row sees those below `end`.
        first_position = context_len - count + first
        end = tl.minimum(first_position + TOKENS, context_len)
        start = tl.where(window > 0, tl.maximum(first_position - window + 1, 0), 0)
        start = start // TILE * TILE
        whole = tl.where(window > 0, start, (first_position + 1) // TILE * TILE)
        reach = tl.where(window > 0, window, context_len)
        table = block_tables + row.to(tl.int64) * table_stride
        best = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        mixed = tl.zeros([ROWS, HEAD_PADDED], dtype=tl.float32)
        for key in range(start, whole, TILE):
            best, total, mixed = _attend_tile(
                queries, best, total, mixed, kv, table, kv_head, key, end, position, reach,
                scale_log2, v_offset, NUM_KV_HEADS, HEAD_DIM, HEAD_PADDED, BLOCK_SIZE, TILE, False,
            )  # fmt: skip
        for key in range(whole, end, TILE):
            best, total, mixed = _attend_tile(
                queries, best, total, mixed, kv, table, kv_head, key, end, position, reach,
                scale_log2, v_offset, NUM_KV_HEADS, HEAD_DIM, HEAD_PADDED, BLOCK_SIZE, TILE, True,
            )  # fmt: skip
        mixed = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
        target = out + index[:, None] * (NUM_KV_HEADS * GROUP * HEAD_DIM) + lanes
        tl.store(target, mixed, mask=is_real)


def attend_chunks(
    out: Tensor, q: Tensor, kv: Tensor, batch: BatchInputs, shape: AttentionShape, window: int
) -> None:
    """Write the rows of `out`, [T, num_heads * head_dim], of slices of two or more tokens."""
    group = shape.num_heads // shape.num_kv_heads
    tiles = prefill_tiles(q.dtype, shape)
    num_tiles = batch.num_tokens // tiles.tokens(group) + batch.num_slices
    prefill_kernel[(num_tiles, shape.num_kv_heads)](
        out,
        q,
        kv,
        batch.block_tables,
        batch.context_lens,
        batch.slice_offsets,
        batch.num_slices,
        shape.scale * LOG2_E,
        window,
        q.stride(0),
        batch.block_tables.stride(0),
        kv.stride(0),
        NUM_KV_HEADS=shape.num_kv_heads,
        GROUP=group,
        HEAD_DIM=shape.head_dim,
        HEAD_PADDED=triton.next_power_of_2(shape.head_dim),
        BLOCK_SIZE=kv.shape[2],
        ROWS=tiles.rows,
        TILE=tiles.keys,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=False,
    )
