"""min_p, top_k and top_p: which tokens of a distribution stay, and with what weight.

In the fixed order of `worker.ranking` each of the three keeps a prefix, so together they
are one number per row. They act in this order, each on what the one before left:

    min_p  keeps tokens at least this share as probable as the first one,
    top_k  keeps this many,
    top_p  keeps tokens before which less than this share of the mass left lies:
           the smallest prefix that reaches the share.

Source: min_p, Nguyen et al. 2024 (arXiv:2407.01082); top_p, Holtzman et al. 2019
(arXiv:1904.09751); meanings and order as in vLLM, ties by lower id.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.ranking import leading

PREFIX_WIDTHS = (128, 2048)
"""On a CPU these many leading tokens are tried before the whole vocabulary is sorted, which
takes 40 times as long as finding 128. The widths change cost only, never the answer."""


@dataclass(frozen=True, slots=True)
class Filters:
    """One number per row. Off: top_k = the vocabulary's size, top_p = 1, min_p = 0."""

    top_k: Tensor
    """[R] int64, at least 1"""
    top_p: Tensor
    """[R] float64 in (0, 1]"""
    min_p: Tensor
    """[R] float64 in [0, 1]"""

    def of(self, rows: Tensor) -> "Filters":
        return Filters(self.top_k[rows], self.top_p[rows], self.min_p[rows])


@dataclass(frozen=True, slots=True)
class Survivors:
    """What is left of N rows, in vocabulary order."""

    rows: Tensor
    """[N] int64, which rows of the question"""
    ids: Tensor
    """[N, W] token ids, rising"""
    weights: Tensor
    """[N, W] their probabilities before filtering, 0 where dropped"""


def survivors(logits: Tensor, probabilities: Tensor, filters: Filters) -> Iterator[Survivors]:
    """The tokens that stay, in groups of rows that needed the same effort; each row once.

    Shapes:
        logits: [R, V] without NaN; give the order
        probabilities: [R, V] softmax of each row, perhaps at a temperature
    """
    num_rows, vocab_size = logits.shape
    rows = torch.arange(num_rows, device=logits.device)
    for width in _widths(logits):
        if len(rows) < num_rows:
            wanted = filters.of(rows)
            ids, sure = leading(logits.index_select(0, rows), width)
            weights = probabilities.index_select(0, rows).gather(1, ids)
        else:
            wanted = filters
            ids, sure = leading(logits, width)
            weights = probabilities.gather(1, ids)
        kept = _num_kept(weights, vocab_size, wanted)
        settled = kept <= sure
        yield _in_vocabulary_order(rows, ids, weights, kept, settled)
        rows = rows[~settled]
        if not len(rows):
            return
    assert not len(rows), "a sorted vocabulary settles every row"


def _widths(logits: Tensor) -> tuple[int, ...]:
    vocab_size = logits.shape[1]
    if logits.device.type != "cpu":
        return (vocab_size,)
    return (*(width for width in PREFIX_WIDTHS if 4 * width <= vocab_size), vocab_size)


def _num_kept(weights: Tensor, vocab_size: int, filters: Filters) -> Tensor:
    """[R] how many leading tokens stay; at least W where the first W < V do not tell.

    Shapes:
        weights: [R, W] probabilities in falling order, of a row's first W tokens
    """
    width = weights.shape[1]
    floor = filters.min_p.to(weights.dtype) * weights[:, 0]
    likely = (weights >= floor[:, None]).sum(dim=-1)
    told = (floor > 0) & ((likely < width) | (width == vocab_size))
    limit = torch.where(told, torch.minimum(likely, filters.top_k), filters.top_k)
    # With neither min_p nor top_k the mass is 1, as a softmax's: no need to add it up.
    is_whole = (floor <= 0) & (limit == vocab_size)

    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    mass = sums.gather(1, (limit - 1).clamp(max=width - 1)[:, None])[:, 0]
    share = filters.top_p * torch.where(is_whole, 1.0, mass)
    before = sums.roll(1, dims=-1)
    before[:, 0] = 0.0
    nucleus = (before < share[:, None]).sum(dim=-1)
    kept = torch.where(filters.top_p < 1.0, torch.minimum(nucleus, limit), limit)
    return torch.where((limit > width) & ~is_whole, limit, kept).clamp(min=1)


def _in_vocabulary_order(
    rows: Tensor, ids: Tensor, weights: Tensor, kept: Tensor, settled: Tensor
) -> Survivors:
    places = torch.arange(ids.shape[1], device=ids.device)
    weights = torch.where(places < kept[:, None], weights, 0.0)
    if not bool(settled.all()):
        rows, ids, weights = rows[settled], ids[settled], weights[settled]
    ids, order = ids.sort(dim=-1)
    return Survivors(rows, ids, weights.gather(1, order))
