"""Which tokens min_p, top_k and top_p leave, against transformers and against the definition."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from worker import filters
from worker.filters import Filters, survivors

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB_SIZE = 1000


def filters_of(rows: int, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Filters:
    return Filters(
        torch.full((rows,), top_k or VOCAB_SIZE),
        torch.full((rows,), top_p, dtype=torch.float64),
        torch.full((rows,), min_p, dtype=torch.float64),
    )


def kept_weights(logits: torch.Tensor, asked: Filters) -> torch.Tensor:
    return survivors(logits, logits.softmax(dim=-1), asked)


def random_logits(rows: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    return spread * torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def by_definition(
    logits: list[float], weights: list[float], top_k: int, top_p: float, min_p: float
) -> list[int]:
    """The ids that stay, one by one in order of rank."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    order = [token for token in order if weights[token] >= np.float32(min_p) * weights[order[0]]]
    order = order[: top_k or len(order)]
    is_whole = len(order) == len(logits)
    share = top_p * (1.0 if is_whole else sum(weights[token] for token in order))
    kept, mass = [], 0.0
    for token in order:
        if top_p < 1.0 and mass >= share:
            break
        kept.append(token)
        mass += weights[token]
    return sorted(kept)


@pytest.mark.parametrize("spread", [0.5, 3.0, 8.0])
@pytest.mark.parametrize("top_k", [1, 2, 50, 127, 128, 129, 400, 999])
def test_top_k_leaves_the_tokens_that_transformers_leaves(top_k: int, spread: float) -> None:
    logits = random_logits(8, seed=top_k, spread=spread)

    assert_same_tokens(logits, filters_of(8, top_k=top_k), [TopKLogitsWarper(top_k)])


@pytest.mark.parametrize("spread", [0.5, 3.0, 8.0])
@pytest.mark.parametrize("top_p", [0.001, 0.1, 0.5, 0.8, 0.95, 0.999])
def test_top_p_leaves_the_tokens_that_transformers_leaves(top_p: float, spread: float) -> None:
    logits = random_logits(8, seed=int(1000 * top_p), spread=spread)

    assert_same_tokens(logits, filters_of(8, top_p=top_p), [TopPLogitsWarper(top_p)])


@pytest.mark.parametrize("spread", [0.5, 3.0, 8.0])
@pytest.mark.parametrize("min_p", [1e-6, 0.001, 0.05, 0.3, 1.0])
def test_min_p_leaves_the_tokens_that_transformers_leaves(min_p: float, spread: float) -> None:
    logits = random_logits(8, seed=int(1000 * min_p), spread=spread)

    assert_same_tokens(logits, filters_of(8, min_p=min_p), [MinPLogitsWarper(min_p)])


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(40, 0.95, 0.0), (300, 0.9, 0.0), (0, 0.9, 0.01), (20, 0.8, 0.02), (500, 0.999, 1e-5)],
)
def test_filters_act_in_the_order_min_p_top_k_top_p(top_k: int, top_p: float, min_p: float) -> None:
    logits = random_logits(16, seed=5)
    warpers: list[LogitsProcessor] = []
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    warpers.append(TopPLogitsWarper(top_p))

    assert_same_tokens(logits, filters_of(16, top_k=top_k, top_p=top_p, min_p=min_p), warpers)


def assert_same_tokens(
    logits: torch.Tensor, asked: Filters, warpers: list[LogitsProcessor]
) -> None:
    expected = logits
    for warper in warpers:
        expected = warper(torch.zeros(len(logits), 0, dtype=torch.long), expected)

    for width in (128, filters.PREFIX_WIDTH):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(filters, "PREFIX_WIDTH", width)
            weights = kept_weights(logits, asked)

        assert torch.equal(weights > 0, expected > -torch.inf)
        kept = weights / weights.sum(dim=-1, keepdim=True)
        torch.testing.assert_close(kept, expected.softmax(dim=-1), rtol=1e-5, atol=0)


@settings(max_examples=50)
@given(
    levels=st.integers(1, 12),
    seed=st.integers(0, 2**32),
    top_k=st.integers(0, 60),
    top_p=st.sampled_from([0.001, 0.1, 0.25, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-4, 0.1, 0.5, 1.0]),
)
def test_ties_are_kept_by_lower_id_whatever_the_width_of_the_prefix(
    levels: int, seed: int, top_k: int, top_p: float, min_p: float
) -> None:
    values = np.random.default_rng(seed).integers(-levels, levels + 1, (6, 64))
    logits = torch.from_numpy(values.astype(np.float32))
    asked = Filters(
        torch.full((6,), top_k or 64),
        torch.full((6,), top_p, dtype=torch.float64),
        torch.full((6,), min_p, dtype=torch.float64),
    )
    weights = logits.softmax(dim=-1)
    expected = [
        by_definition(row, weight, top_k, top_p, min_p)
        for row, weight in zip(logits.tolist(), weights.tolist(), strict=True)
    ]

    for width in (1, 4, 15, 16, 64):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(filters, "PREFIX_WIDTH", width)
            left = kept_weights(logits, asked)

        assert [row.nonzero()[:, 0].tolist() for row in left] == expected
        assert torch.equal(left[left > 0], weights[left > 0])


def test_top_k_of_1_keeps_the_greedy_token_even_among_ties() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [30, 20, 700]] = 5.0

    weights = kept_weights(logits, filters_of(1, top_k=1))

    assert weights[0].nonzero().tolist() == [[20]]


def test_of_equal_probabilities_the_higher_logit_stays() -> None:
    """Close logits can have one probability in float32; top_k of 1 is still greedy."""
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [30, 20, 700]] = torch.tensor([1e-9, 2e-9, 3e-9])
    assert len(logits.softmax(dim=-1).unique()) == 1

    assert kept_weights(logits, filters_of(1, top_k=1))[0].nonzero().tolist() == [[700]]
    assert kept_weights(logits, filters_of(1, top_k=4))[0].nonzero()[:, 0].tolist() == [
        0, 20, 30, 700,
    ]  # fmt: skip


def test_the_tiniest_top_p_keeps_one_token() -> None:
    weights = kept_weights(random_logits(4, seed=0), filters_of(4, top_p=5e-324))

    assert (weights > 0).sum(dim=-1).tolist() == [1, 1, 1, 1]


def test_tokens_ruled_out_before_do_not_come_back() -> None:
    logits = torch.full((1, VOCAB_SIZE), -torch.inf)
    logits[0, [3, 500]] = 1.0

    weights = kept_weights(logits, filters_of(1, top_k=50, top_p=0.9999))

    assert weights[0].nonzero().tolist() == [[3], [500]]
