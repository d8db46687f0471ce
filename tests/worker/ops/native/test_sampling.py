"""Drawing tokens natively against the definition of the sampler, in double precision."""

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.worker.ops.drawn_rows import Row, check_draws, draw_rows, make_rows, random_logits
from worker.chance import uniform
from worker.ops.cpu import CpuOperations
from worker.ops.draws import Draws
from worker.ops.native.sampling import draw


def drawn(ops: CpuOperations, logits: Tensor, rows: list[Row]) -> Draws:
    return draw_rows(partial(draw, ops.team), logits, rows)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    vocab_size=st.one_of(st.integers(1, 70), st.sampled_from([255, 256, 257, 700, 3000])),
    scale=st.sampled_from([0.0, 1e-6, 0.1, 1.0, 4.0, 30.0]),
    has_ties=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_filtered_draws_are_the_samplers_by_definition(
    ops: CpuOperations, vocab_size: int, scale: float, has_ties: bool, seed: int
) -> None:
    logits = random_logits(6, vocab_size, has_ties, seed) * scale
    logits = logits.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    logits[:, -1] = 0.0
    rows = make_rows(logits, seed)

    # Equal weights put the borders of filters just between two ids.
    check_draws(drawn(ops, logits, rows), logits, rows, tolerance=1e-6, most_near=1.0)


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_filtered_draws_from_a_real_vocabulary_are_the_samplers(
    ops: CpuOperations, has_ties: bool, scale: float
) -> None:
    logits = random_logits(8, 49_152, has_ties) * scale
    rows = make_rows(logits, seed=3)

    check_draws(drawn(ops, logits, rows), logits, rows, tolerance=1e-6, most_near=0.25)


@pytest.mark.parametrize("top_k", [1, 2, 40, 64, 65, 190, 191, 192, 193, 300, 49_151])
@pytest.mark.parametrize("has_ties", [False, True])
def test_top_k_of_any_size_keeps_just_so_many(
    ops: CpuOperations, top_k: int, has_ties: bool
) -> None:
    """At the highest temperature, and by numbers that reach into the last ids."""
    logits = random_logits(4, 49_152, has_ties) / 10
    rows = [Row(temperature=2.0, top_k=top_k, seed=seed) for seed in range(4)]

    check_draws(drawn(ops, logits, rows), logits, rows, tolerance=1e-7, most_near=0.25)


def test_of_equal_logits_the_lower_ids_stay(ops: CpuOperations) -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0, 5.0, 0.0]] * 6)
    rows = [
        Row(top_k=top_k, top_p=top_p, seed=seed)
        for seed in (1, 2)
        for top_k, top_p in ((2, 1.0), (2**31, 0.4), (3, 0.5))
    ]
    assert set(drawn(ops, logits, rows).token.tolist()) == {1, 2}


def test_thousands_of_equal_logits_are_cut_at_the_right_id(ops: CpuOperations) -> None:
    logits = torch.zeros(3, 5000)
    logits[:, ::2] = -0.0
    rows = [
        Row(top_k=1000, seed=7),
        Row(top_p=0.2, seed=7),
        Row(top_k=2000, top_p=0.5, seed=7),
    ]
    number = uniform([7], [1])[0]
    assert drawn(ops, logits, rows).token.tolist() == [int(1000 * number)] * 3


def test_logits_that_lie_as_close_as_floats_can_are_told_apart(ops: CpuOperations) -> None:
    smallest = torch.arange(3000, dtype=torch.int32).view(torch.float32)
    near_one = (torch.arange(3000, dtype=torch.int32) + 0x3F800000).view(torch.float32)
    logits = torch.stack((smallest, near_one, smallest.flip(0), near_one.flip(0)))
    rows = [Row(top_k=1000, seed=3)] * 4

    check_draws(drawn(ops, logits, rows), logits, rows)


def test_the_number_has_the_bits_of_the_table_of_chance(ops: CpuOperations) -> None:
    rows = [
        Row(seed=seed, position=position) for seed in (0, -1, 2**63 - 1) for position in (0, 2**31)
    ]
    tokens = drawn(ops, torch.zeros(len(rows), 2**16), rows).token.tolist()
    wanted = uniform([row.seed for row in rows], [row.position for row in rows]) * 2**16
    assert tokens == wanted.astype(int).tolist()


def test_temperature_zero_takes_the_lowest_of_the_most_probable_ids(ops: CpuOperations) -> None:
    logits = torch.zeros(1, 5000)
    logits[0, [3210, 77, 4999]] = 2.5
    greedy = drawn(ops, logits, [Row(temperature=0.0, top_p=0.5)])
    assert greedy.token.tolist() == [77]
    assert greedy.best.tolist() == [2.5]


@pytest.mark.parametrize("place", [0, 4, 29])
def test_a_row_with_a_nan_is_told_apart_and_spoils_no_other(ops: CpuOperations, place: int) -> None:
    logits = torch.randn((3, 30), generator=torch.Generator().manual_seed(0))
    alone = drawn(ops, logits, [Row(top_k=5)] * 3).token.tolist()
    logits[1, place] = float("nan")
    together = drawn(ops, logits, [Row(top_k=5)] * 3)
    assert together.best.isnan().tolist() == [False, True, False]
    assert [together.token[0], together.token[2]] == [alone[0], alone[2]]


@pytest.mark.parametrize("value", [float("inf"), 1e35, float("nan"), float("-inf"), -3e38])
def test_a_row_that_cannot_be_divided_says_so_by_its_best_logit(
    ops: CpuOperations, value: float
) -> None:
    found = drawn(ops, torch.full((1, 300), value), [Row(temperature=0.01, top_p=0.5, top_k=3)])
    assert found.best.nan_to_num(-1.0).tolist() == torch.tensor([value]).nan_to_num(-1.0).tolist()
    assert 0 <= int(found.token) < 300


def test_top_k_of_one_is_greedy_at_any_temperature(ops: CpuOperations) -> None:
    logits = torch.randn((2, 60), generator=torch.Generator().manual_seed(1))
    rows = [Row(top_k=1, temperature=2.0), Row(top_p=1e-9)]
    assert drawn(ops, logits, rows).token.tolist() == logits.argmax(dim=1).tolist()


def test_ids_of_weight_zero_are_never_drawn(ops: CpuOperations) -> None:
    logits = torch.full((8, 3000), float("-inf"))
    logits[:, [5, 2999]] = 0.0
    plain = [Row(seed=seed) for seed in range(8)]
    assert set(drawn(ops, logits, plain).token.tolist()) == {5, 2999}
    more_than_there_are = [Row(seed=1, top_k=10, top_p=0.9), Row(seed=2, top_k=10)]
    assert set(drawn(ops, logits[:2, :9], more_than_there_are).token.tolist()) == {5}


def test_a_draw_is_the_same_alone_in_company_and_on_more_threads(
    ops: CpuOperations, more_threads: CpuOperations
) -> None:
    logits = random_logits(33, 3000, has_ties=False)
    rows = make_rows(logits, seed=9)
    together = drawn(ops, logits, rows)
    again = drawn(more_threads, logits, rows)

    assert together.token.equal(again.token)
    assert together.best.equal(again.best)
    for row in range(33):
        alone = drawn(ops, logits[row : row + 1], rows[row : row + 1])
        assert alone.token.equal(together.token[row : row + 1])


def test_rows_may_lie_apart(ops: CpuOperations) -> None:
    wide = random_logits(5, 900, has_ties=False)
    rows = make_rows(wide, seed=2)

    apart = drawn(ops, wide[:, 100:800], rows)

    assert apart.token.equal(drawn(ops, wide[:, 100:800].contiguous(), rows).token)
