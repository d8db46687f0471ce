"""Drawing tokens in Triton against the definition of the sampler, in double precision."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.worker.ops.interpreted import DEVICE, HAS_GPU
from worker.chance import uniform
from worker.ops.triton.sampling import Draws, draw


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row's parameters; all filters are off."""

    temperature: float = 1.0
    top_k: int = 2**31
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 1
    position: int = 1


def drawn(logits: Tensor, rows: list[Row]) -> Draws:
    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(row, name) for row in rows], dtype=dtype, device=DEVICE)

    return draw(
        logits.to(DEVICE),
        column("temperature", torch.float32),
        column("top_k", torch.int64),
        column("top_p", torch.float64),
        column("min_p", torch.float64),
        column("seed", torch.int64),
        column("position", torch.int64),
    )


def expected(logits: Tensor, row: Row) -> tuple[int, bool]:
    """By definition, in double precision, and whether the answer hangs on rounding: a filter's
    border or the number within 1e-5 of another token."""
    scores = logits.numpy().astype(np.float64)
    order = np.lexsort((np.arange(len(scores)), -scores))
    weights = np.exp((scores - scores.max()) / row.temperature)[order]
    answers = set()
    for shift in (0.0, -1e-5, 1e-5):
        likely = int((weights >= row.min_p * (1 + shift)).sum())
        kept = weights[: max(1, min(likely, row.top_k))]
        before = np.cumsum(kept) - kept
        kept = kept[before < row.top_p * (1 + shift) * kept.sum()] if row.top_p < 1 else kept
        staying = np.zeros_like(weights)
        staying[order[: len(kept)]] = kept
        sums = np.cumsum(staying)
        for move in (0.0, -1e-5, 1e-5):
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


@pytest.mark.slow
@pytest.mark.parametrize("has_ties", [False, True])
def test_many_filtered_draws_are_the_samplers_by_definition(has_ties: bool) -> None:
    num_rows, vocab_size = (5000, 50_000) if HAS_GPU else (40, 3000)
    check_draws(has_ties, num_rows, vocab_size)


@pytest.mark.parametrize("has_ties", [False, True])
def test_filtered_draws_are_the_samplers_by_definition(has_ties: bool) -> None:
    check_draws(has_ties, num_rows=10, vocab_size=40)


def check_draws(has_ties: bool, num_rows: int, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(int(has_ties))
    logits = 3 * torch.randn((num_rows, vocab_size), generator=generator)
    if has_ties:
        logits = logits.round()
        logits[:, ::7] = float("-inf")
    rows = make_rows(logits, seed=5)

    tokens = drawn(logits, rows).token.tolist()

    num_near = 0
    for token, scores, row in zip(tokens, logits, rows, strict=True):
        wanted, is_near = expected(scores, row)
        num_near += is_near
        assert token == wanted or is_near, f"{token} instead of {wanted} for {row}"
    assert num_near <= num_rows / 10


def test_of_equal_logits_the_lower_ids_stay() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0, 5.0, 0.0]] * 6)
    rows = [
        Row(top_k=top_k, top_p=top_p, seed=seed)
        for seed in (1, 2)
        for top_k, top_p in ((2, 1.0), (2**31, 0.4), (3, 0.5))
    ]
    assert set(drawn(logits, rows).token.tolist()) == {1, 2}


def test_the_number_has_the_bits_of_the_table_of_chance() -> None:
    vocab_size = 2**16 if HAS_GPU else 2**13
    rows = [
        Row(seed=seed, position=position) for seed in (0, -1, 2**63 - 1) for position in (0, 2**31)
    ]
    tokens = drawn(torch.zeros(len(rows), vocab_size), rows).token.tolist()
    wanted = uniform([row.seed for row in rows], [row.position for row in rows]) * vocab_size
    assert tokens == wanted.astype(int).tolist()


def test_temperature_zero_takes_the_lowest_of_the_most_probable_ids() -> None:
    logits = torch.zeros(1, 5000)
    logits[0, [3210, 77, 4999]] = 2.5
    drawn_greedily = drawn(logits, [Row(temperature=0.0, top_p=0.5)])
    assert drawn_greedily.token.tolist() == [77]
    assert drawn_greedily.best.tolist() == [2.5]


def test_a_row_with_a_nan_is_told_apart_and_spoils_no_other() -> None:
    logits = torch.randn((3, 30), generator=torch.Generator().manual_seed(0))
    alone = drawn(logits, [Row(top_k=5)] * 3).token.tolist()
    logits[1, 4] = float("nan")
    together = drawn(logits, [Row(top_k=5)] * 3)
    assert together.best.isnan().tolist() == [False, True, False]
    assert [together.token[0], together.token[2]] == [alone[0], alone[2]]


def test_a_row_without_any_allowed_id_says_so() -> None:
    assert drawn(torch.full((1, 10), float("-inf")), [Row()]).best.tolist() == [float("-inf")]


def test_top_k_of_one_is_greedy_at_any_temperature() -> None:
    logits = torch.randn((2, 60), generator=torch.Generator().manual_seed(1))
    rows = [Row(top_k=1, temperature=2.0), Row(top_p=1e-9)]
    assert drawn(logits, rows).token.tolist() == logits.argmax(dim=1).tolist()


def test_ids_of_weight_zero_are_never_drawn() -> None:
    logits = torch.full((8, 3000), float("-inf"))
    logits[:, [5, 2999]] = 0.0
    plain = [Row(seed=seed) for seed in range(8)]
    assert set(drawn(logits, plain).token.tolist()) == {5, 2999}
    more_than_there_are = [Row(seed=1, top_k=10, top_p=0.9), Row(seed=2, top_k=10)]
    assert set(drawn(logits[:2, :9], more_than_there_are).token.tolist()) == {5}


def test_a_draw_is_the_same_alone_and_in_company() -> None:
    logits = torch.randn((4, 50), generator=torch.Generator().manual_seed(2))
    rows = make_rows(logits, seed=9)
    together = drawn(logits, rows).token.tolist()
    assert together[2:3] == drawn(logits[2:3], rows[2:3]).token.tolist()
