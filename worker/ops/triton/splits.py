"""How one decode's context is cut into parts that separate programs attend to.

Flash-decoding: a single query has too little work for a GPU unless many programs share its
context. The cut depends on the visible length of that one sequence and on the shard's
number of K/V heads, never on the batch, so a sequence's result is the same bits in any
company (ADR 0010).

Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
"""

import triton
import triton.language as tl

MIN_SPLIT = 256
"""Tokens of a part, until a sequence has `max_splits` of them; then the parts grow."""

_MOST_SPLITS = 64
_PROGRAMS_WANTED = 128
"""About the number of multiprocessors of the GPUs in use: one sequence should occupy them."""


def max_splits(num_kv_heads: int) -> int:
    """Most parts of one sequence: a power of two that is fixed for a shard."""
    wanted = max(1, _PROGRAMS_WANTED // num_kv_heads)
    return min(_MOST_SPLITS, 1 << (wanted.bit_length() - 1))


def bound_splits(max_visible: int, most: int) -> int:
    """Most parts of any sequence that sees at most `max_visible` tokens."""
    return max(1, min(most, -(-max_visible // MIN_SPLIT)))


@triton.jit
def visible_tokens(context_len, window):
    """How many cached tokens the last token of a sequence sees, itself included."""
    return tl.where(window > 0, tl.minimum(context_len, window), context_len)


@triton.jit
def split_length(visible, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, TILE: tl.constexpr):
    """Tokens per part; the last part may be shorter, none is empty."""
    needed = (visible + MAX_SPLITS - 1) // MAX_SPLITS
    return tl.maximum((needed + TILE - 1) // TILE * TILE, MIN_SPLIT)


@triton.jit(do_not_specialize=["num_slices", "window"])
def plan_kernel(
    items,
    context_lens,
    slice_offsets,
    num_slices,
    window,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    SLICES: tl.constexpr,
):
    """List the parts of all decodes, so that no program is started for nothing.

    One program. items[0] is their number, items[1:] are slice * MAX_SPLITS + part, in
    order. A padded decode (context 0) is one part, which yields zeros; longer slices have
    none.
    """
    total = 0
    lane = tl.arange(0, SLICES)
    part = tl.arange(0, MAX_SPLITS)
    for first in range(0, num_slices, SLICES):
        row = first + lane
        is_slice = row < num_slices
        start = tl.load(slice_offsets + row, mask=is_slice, other=0)
        end = tl.load(slice_offsets + row + 1, mask=is_slice, other=0)
        context_len = tl.load(context_lens + row, mask=is_slice, other=0)
        visible = visible_tokens(context_len, window)
        length = split_length(visible, MIN_SPLIT, MAX_SPLITS, TILE)
        parts = tl.maximum((visible + length - 1) // length, 1)
        parts = tl.where(end - start == 1, parts, 0)
        place = total + tl.cumsum(parts, 0) - parts
        tl.store(
            items + 1 + place[:, None] + part[None, :],
            row[:, None] * MAX_SPLITS + part[None, :],
            mask=part[None, :] < parts[:, None],
        )
        total += tl.sum(parts, 0)
    tl.store(items, total)
