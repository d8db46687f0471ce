"""min_p, top_k and top_p: which tokens of a distribution stay, and with what weight.

In falling order of probability (of equal ones the higher logit first, then the lower id)
each of the three keeps a prefix, so together they are one number per row. They act in this
order, each on what the one before left:

    min_p  keeps tokens at least this share as probable as the first one,
    top_k  keeps this many,
    top_p  keeps tokens before which less than this share of the mass left lies:
           the smallest prefix that reaches the share.

How long the prefix is follows from the sorted probabilities alone, without their ids; the
least probability in it then says which tokens stay. Sorting values is 15 times as fast as
sorting ids by them, and on a CPU most rows need only their largest few thousand.

Source: min_p, Nguyen et al. 2024 (arXiv:2407.01082); top_p, Holtzman et al. 2019
(arXiv:1904.09751); meanings and order as in vLLM.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

PREFIX_WIDTH = 4096
"""On a CPU this many largest probabilities are tried before all are sorted. Raising it costs
little for most rows and saves the full sort for flat ones; it never changes the answer."""


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


def survivors(logits: Tensor, probabilities: Tensor, filters: Filters) -> Tensor:
    """The probabilities of the tokens that stay, not renormalized, and 0 for the others.

    Shapes:
        logits: [R, V] without NaN; only order equal probabilities
        probabilities: [R, V] softmax of each row, perhaps at a temperature
    Returns:
        [R, V] in the dtype of `probabilities`
    """
    kept, least = _prefixes(probabilities, filters)
    stays = probabilities >= least[:, None]
    excess = torch.where(least > 0, stays.sum(dim=-1) - kept, 0)
    for row in excess.nonzero()[:, 0].tolist():
        tied = (probabilities[row] == least[row]).nonzero()[:, 0]
        order = logits[row, tied].sort(descending=True, stable=True).indices
        stays[row, tied[order[len(tied) - int(excess[row]) :]]] = False
    return torch.where(stays, probabilities, 0.0)


def _prefixes(probabilities: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """[R] how many tokens stay, and [R] the least probability among them."""
    num_rows, vocab_size = probabilities.shape
    kept = torch.empty(num_rows, dtype=torch.int64, device=probabilities.device)
    least = torch.empty(num_rows, dtype=probabilities.dtype, device=probabilities.device)
    rows = torch.arange(num_rows, device=probabilities.device)
    for width in _widths(probabilities):
        asked = probabilities if len(rows) == num_rows else probabilities[rows]
        values = _largest(asked, width)
        counts = _num_kept(values, vocab_size, filters.of(rows))
        kept[rows] = counts
        least[rows] = values.gather(1, (counts - 1).clamp(max=width - 1)[:, None])[:, 0]
        if width < vocab_size:
            rows = rows[counts >= width]
            if not len(rows):
                break
    return kept, least


def _widths(probabilities: Tensor) -> tuple[int, ...]:
    vocab_size = probabilities.shape[1]
    if probabilities.device.type == "cpu" and vocab_size >= 4 * PREFIX_WIDTH:
        return (PREFIX_WIDTH, vocab_size)
    return (vocab_size,)


def _largest(probabilities: Tensor, width: int) -> Tensor:
    """[R, width] the largest values of each row, falling."""
    if probabilities.device.type != "cpu":
        return probabilities.sort(dim=-1, descending=True).values[:, :width]
    # numpy sorts plain values with vector instructions, torch only together with their ids.
    values = probabilities.numpy()
    start = values.shape[1] - width
    if start:
        values = np.partition(values, start, axis=1)[:, start:]
    return torch.from_numpy(np.sort(values, axis=1)[:, ::-1].copy())


def _num_kept(weights: Tensor, vocab_size: int, filters: Filters) -> Tensor:
    """[R] how many tokens stay; W or more where the W < V largest do not tell.

    Shapes:
        weights: [R, W] the largest probabilities of each row, falling
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
