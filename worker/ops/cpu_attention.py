"""How the CPU set attends: planned once per step and window, carried out in each layer.

Torch has no attention that follows a block table, so blocks are gathered first (or, where a
sequence's blocks happen to follow one another, used where they are). A query head group is
laid along the query axis for decodes, so that its K/V are read once, and along the batch
axis for slices of several tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.ops.table import NO_WINDOW, AttentionShape, BatchInputs

PIECE_ROWS = 128
"""Query rows of one call. More: fewer calls, more scores computed only to be masked."""

SIMILAR = 0.75
"""Decodes share a batch if none has fewer blocks than this part of the longest one's."""

_Int32Rows = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Where the K/V of some slices lie: one run of blocks, or a list to gather."""

    num_slices: int
    per_slice: int
    run_start: int | None
    """The first of `per_slice` blocks that follow one another, for a single slice."""
    rows: Tensor | None
    """[2 * num_slices * per_slice] int64 rows of the pool as [2 * B, ...]: all K, then all V"""

    def fetch(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """K and V, each [num_slices, num_kv_heads, length, head_dim] and strided."""
        if self.rows is None:
            assert self.run_start is not None
            found = kv[:, self.run_start : self.run_start + self.per_slice]
        else:
            found = kv.view(2 * kv.shape[1], -1).index_select(0, self.rows)
        length = self.per_slice * kv.shape[2]
        found = found.view(2, self.num_slices, length, kv.shape[3], kv.shape[4]).transpose(2, 3)
        return found[0], found[1]


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Slices of one token and of similar length, attended to in one call."""

    tokens: Tensor | None
    """[n] int64 rows of q and of the output; None: all of them, in order"""
    blocks: _Blocks
    mask: Tensor
    """[n, 1, 1, length] to be added to the scores"""

    def attend(self, q: Tensor, kv: Tensor, out: Tensor, shape: AttentionShape) -> None:
        own = q if self.tokens is None else q.index_select(0, self.tokens)
        k, v = self.blocks.fetch(kv)
        own = own.view(own.shape[0], shape.num_kv_heads, -1, shape.head_dim)
        found = _scaled_dot_product(own, k, v, self.mask, shape.scale)
        if self.tokens is None:
            out.view(own.shape).copy_(found)
        else:
            out.index_copy_(0, self.tokens, found.reshape(found.shape[0], *out.shape[1:]))


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some rows of a slice and the keys that at least one of them sees."""

    first_token: int
    num_tokens: int
    first_key: int
    num_keys: int
    """The last key is that of the last token."""
    mask: Tensor
    """[num_tokens, num_keys] to be added to the scores"""


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One slice of several tokens."""

    blocks: _Blocks
    pieces: tuple[_Piece, ...]

    def attend(self, q: Tensor, kv: Tensor, out: Tensor, shape: AttentionShape) -> None:
        group = shape.num_heads // shape.num_kv_heads
        k, v = (found.expand(group, -1, -1, -1) for found in self.blocks.fetch(kv))
        grouped = (-1, shape.num_kv_heads, group, shape.head_dim)
        for piece in self.pieces:
            tokens = slice(piece.first_token, piece.first_token + piece.num_tokens)
            keys = slice(piece.first_key, piece.first_key + piece.num_keys)
            found = _scaled_dot_product(
                q[tokens].view(grouped).permute(2, 1, 0, 3),
                k[:, :, keys],
                v[:, :, keys],
                piece.mask[None, None],
                shape.scale,
            )
            out[tokens].view(grouped).copy_(found.permute(2, 1, 0, 3))


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """All slices of one step, under one window."""

    parts: tuple[_Decodes | _Prefill, ...]

    def attend(self, q: Tensor, kv: Tensor, shape: AttentionShape) -> Tensor:
        """`Operations.paged_attention`."""
        out = torch.empty(q.shape, dtype=q.dtype)
        for part in self.parts:
            part.attend(q, kv, out, shape)
        return out.flatten(1)


def plan_attention(
    batch: BatchInputs, block_size: int, num_blocks: int, window: int, dtype: torch.dtype
) -> AttentionPlan:
    """Group the slices of a batch and find their blocks. No padding on a CPU."""
    offsets = batch.slice_offsets.numpy()
    counts = np.diff(offsets)
    contexts = batch.context_lens.numpy()
    tables = batch.block_tables.numpy()
    first_seen = np.zeros_like(contexts)
    if window != NO_WINDOW:
        first_seen = np.maximum(contexts - counts - window + 1, 0)
    layout = _Layout(tables, contexts, first_seen // block_size, block_size, num_blocks)
    is_decode = counts == 1
    parts: list[_Decodes | _Prefill] = []
    if is_decode.any():
        decodes = np.flatnonzero(is_decode)
        is_all = len(decodes) == len(counts)
        for members in layout.similar(decodes):
            tokens = None if is_all and len(members) == len(counts) else offsets[members]
            parts.append(layout.decodes(members, tokens, window, dtype))
    for index in np.flatnonzero(~is_decode).tolist():
        parts.append(layout.prefill(index, int(offsets[index]), int(counts[index]), window, dtype))
    return AttentionPlan(tuple(parts))


@dataclass(frozen=True, slots=True)
class _Layout:
    """Tables and lengths of the slices of one step."""

    tables: _Int32Rows
    contexts: _Int32Rows
    first_blocks: _Int32Rows
    """The first block of each slice that one of its tokens sees."""
    block_size: int
    num_blocks: int

    def similar(self, slices: npt.NDArray[np.intp]) -> Iterator[npt.NDArray[np.intp]]:
        """Cut slices into groups of similar numbers of blocks, each in its first order."""
        needed = self._needed(slices)
        order = np.argsort(-needed, kind="stable")
        falling = needed[order]
        start = 0
        while start < len(order):
            stop = int(np.searchsorted(-falling, -SIMILAR * falling[start], side="right"))
            yield slices[np.sort(order[start:stop])]
            start = stop

    def decodes(
        self,
        members: npt.NDArray[np.intp],
        tokens: _Int32Rows | None,
        window: int,
        dtype: torch.dtype,
    ) -> _Decodes:
        per_slice = int(self._needed(members).max())
        first = self.first_blocks[members] * self.block_size
        keys = first[:, None] + np.arange(per_slice * self.block_size, dtype=np.int32)
        contexts = self.contexts[members][:, None]
        is_seen = keys < contexts
        if window != NO_WINDOW:
            is_seen &= keys >= contexts - window
        mask = torch.zeros(is_seen.shape, dtype=dtype)
        mask.masked_fill_(torch.from_numpy(~is_seen), float("-inf"))
        rows = None if tokens is None else torch.from_numpy(tokens.astype(np.int64))
        return _Decodes(rows, self._blocks(members, per_slice), mask[:, None, None, :])

    def prefill(
        self, index: int, first_token: int, count: int, window: int, dtype: torch.dtype
    ) -> _Prefill:
        member = np.array([index])
        first_block, context = int(self.first_blocks[index]), int(self.contexts[index])
        base = first_block * self.block_size
        longest = context - base
        mask = _right_aligned_mask(min(count, PIECE_ROWS), longest, window, dtype)
        pieces = []
        for start in range(0, count, PIECE_ROWS):
            num_tokens = min(PIECE_ROWS, count - start)
            stop = context - count + start + num_tokens
            low = max(stop - num_tokens - window + 1, base) if window != NO_WINDOW else base
            num_keys = stop - low
            cut = mask[mask.shape[0] - num_tokens :, longest - num_keys :]
            pieces.append(_Piece(first_token + start, num_tokens, low - base, num_keys, cut))
        per_slice = -(-context // self.block_size) - first_block
        return _Prefill(self._blocks(member, per_slice), tuple(pieces))

    def _needed(self, slices: npt.NDArray[np.intp]) -> _Int32Rows:
        """Blocks from the first seen to the last, of each slice."""
        last: _Int32Rows = -(-self.contexts[slices] // self.block_size)
        return last - self.first_blocks[slices]

    def _blocks(self, members: npt.NDArray[np.intp], per_slice: int) -> _Blocks:
        columns = self.first_blocks[members][:, None] + np.arange(per_slice)
        # Shorter slices are filled up with whatever is there; the mask hides it.
        columns = np.minimum(columns, self.tables.shape[1] - 1)
        found = self.tables[members[:, None], columns].astype(np.int64)
        np.clip(found, 0, self.num_blocks - 1, out=found)
        if len(members) == 1 and (np.diff(found[0]) == 1).all():
            return _Blocks(1, per_slice, int(found[0, 0]), None)
        rows = np.concatenate((found.ravel(), found.ravel() + self.num_blocks))
        return _Blocks(len(members), per_slice, None, torch.from_numpy(rows))


def _right_aligned_mask(rows: int, columns: int, window: int, dtype: torch.dtype) -> Tensor:
    """What the last `rows` of `columns` tokens see; any lower right part of it serves as well,
    since only the distance between token and key counts."""
    distance = torch.arange(columns - rows, columns)[:, None] - torch.arange(columns)
    is_hidden = distance < 0
    if window != NO_WINDOW:
        is_hidden |= distance >= window
    return torch.zeros((rows, columns), dtype=dtype).masked_fill_(is_hidden, float("-inf"))


def _scaled_dot_product(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """softmax(q @ k.T * scale + mask) @ v.

    The operator is called by name: the public function adds checks that cost as much as a
    short decode itself.
    """
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=mask, scale=scale
    )[0]
    return out
