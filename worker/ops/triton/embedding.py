"""Rows of one shard of the embedding, zeros for the other shards' tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDTH = 1024


@triton.jit
def embedding_kernel(
    out,
    token_ids,
    table,
    first_id,
    num_ids,
    stride,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < HIDDEN
    local = tl.load(token_ids + row) - first_id
    held = tl.where((local >= 0) & (local < num_ids), HIDDEN, 0)
    value = tl.load(table + local * stride + column, mask=column < held, other=0.0)
    tl.store(out + row * HIDDEN + column, value, mask=inside)


def embedding(token_ids: Tensor, table: Tensor, first_id: int) -> Tensor:
    """[T, hidden] rows of `table`, [V, hidden], which holds the ids from `first_id` on."""
    num_tokens, (num_ids, hidden) = token_ids.shape[0], table.shape
    out = torch.empty((num_tokens, hidden), dtype=table.dtype, device=table.device)
    grid = (num_tokens, triton.cdiv(hidden, _WIDTH))
    embedding_kernel[grid](
        out,
        token_ids,
        table,
        first_id,
        num_ids,
        table.stride(0),
        HIDDEN=hidden,
        WIDTH=_WIDTH,
        enable_fp_fusion=False,
    )
    return out
