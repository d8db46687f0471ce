"""Drawing tokens in Triton against the definition of the sampler, in double precision."""

import pytest
import torch
from torch import Tensor

from tests.worker.ops.drawn_rows import Row, check_draws, draw_rows, make_rows, random_logits
from tests.worker.ops.interpreted import DEVICE, HAS_GPU
from worker.chance import uniform
from worker.ops.draws import Draws
from worker.ops.triton.sampling import draw


def drawn(logits: Tensor, rows: list[Row]) -> Draws:
    return draw_rows(draw, logits.to(DEVICE), rows)


@pytest.mark.slow
@pytest.mark.parametrize("has_ties", [False, True])
def test_many_filtered_draws_are_the_samplers_by_definition(has_ties: bool) -> None:
    logits = random_logits(*((5000, 50_000) if HAS_GPU else (40, 3000)), has_ties)
    rows = make_rows(logits, seed=5)
    check_draws(drawn(logits, rows), logits, rows)


@pytest.mark.parametrize("has_ties", [False, True])
def test_filtered_draws_are_the_samplers_by_definition(has_ties: bool) -> None:
    logits = random_logits(10, 40, has_ties)
    rows = make_rows(logits, seed=5)
    check_draws(drawn(logits, rows), logits, rows)


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
