"""Rows to draw tokens from, and the sampler's definition of what is drawn, in double precision."""

import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.chance import uniform
from worker.ops.draws import Draw, Draws


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row's parameters; all filters are off."""

    temperature: float = 1.0
    top_k: int = 2**31
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 1
    position: int = 1


def draw_rows(draw: Draw, logits: Tensor, rows: list[Row]) -> Draws:
    """What a kernel chooses, on the device of the logits."""

    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(row, name) for row in rows], dtype=dtype, device=logits.device)

    return draw(
        logits,
        column("temperature", torch.float32),
        column("top_k", torch.int64),
        column("top_p", torch.float64),
        column("min_p", torch.float64),
        column("seed", torch.int64),
        column("position", torch.int64),
    )


def expected(logits: Tensor, row: Row, tolerance: float) -> tuple[int, bool]:
    """By definition, in double precision, and whether the answer hangs on rounding: a filter's
    border or the number within the tolerance of another token."""
    scores = logits.numpy().astype(np.float64)
    order = np.lexsort((np.arange(len(scores)), -scores))
    weights = np.exp((scores - scores.max()) / row.temperature)[order]
    answers = set()
    for shift in (0.0, -tolerance, tolerance):
        likely = int((weights >= row.min_p * (1 + shift)).sum())
        kept = weights[: max(1, min(likely, row.top_k))]
        before = np.cumsum(kept) - kept
        kept = kept[before < row.top_p * (1 + shift) * kept.sum()] if row.top_p < 1 else kept
        staying = np.zeros_like(weights)
        staying[order[: len(kept)]] = kept
        sums = np.cumsum(staying)
        for move in (0.0, -tolerance, tolerance):
            number = uniform(np.int64(row.seed), np.int64(row.position)) + move
            answers.add(int(np.searchsorted(sums, number * sums[-1], side="right")))
            if not shift and not move:
                exact = int(np.searchsorted(sums, number * sums[-1], side="right"))
    return exact, len(answers) > 1


def make_rows(logits: Tensor, seed: int) -> list[Row]:
    choose = random.Random(seed)
    return [
        Row(
            temperature=choose.uniform(0.1, 2.0),
            top_k=choose.choice((2**31, choose.randint(1, logits.shape[1]))),
            top_p=choose.choice((1.0, 0.95, choose.uniform(0.01, 1.0))),
            min_p=choose.choice((0.0, 0.05, choose.uniform(0.0, 1.0))),
            seed=choose.randint(-(2**63) + 1, 2**63 - 1),
            position=choose.randint(0, 100_000),
        )
        for _ in range(len(logits))
    ]


def random_logits(num_rows: int, vocab_size: int, has_ties: bool, seed: int = 0) -> Tensor:
    """With ties: whole numbers, and some ids banned."""
    generator = torch.Generator().manual_seed(2 * seed + has_ties)
    logits = 3 * torch.randn((num_rows, vocab_size), generator=generator)
    if has_ties:
        logits = logits.round()
        logits[:, ::7] = float("-inf")
    return logits


def check_draws(
    draws: Draws,
    logits: Tensor,
    rows: list[Row],
    *,
    tolerance: float = 1e-5,
    most_near: float = 0.1,
) -> None:
    """Fail unless every token is the sampler's, but where the answer hangs on rounding.

    Args:
        most_near: share of the rows of which that may be true
    """
    num_near = 0
    for token, scores, row in zip(draws.token.tolist(), logits, rows, strict=True):
        wanted, is_near = expected(scores, row, tolerance)
        num_near += is_near
        assert token == wanted or is_near, f"{token} instead of {wanted} for {row}"
    assert num_near <= most_near * len(rows)
