"""The order of tokens: higher logit first, and of equal ones the lower id."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worker.ranking import BadLogits, leaders, leading, top

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_LEVELS = st.integers(1, 30)
SIZES = st.tuples(st.integers(1, 5), st.integers(1, 80))


def tied_logits(shape: tuple[int, int], levels: int, seed: int) -> torch.Tensor:
    """Few distinct values, so that most cuts fall among ties; some ids ruled out."""
    values = np.random.default_rng(seed).integers(0, levels, shape).astype(np.float32)
    values[values == 0] = -np.inf
    return torch.from_numpy(values)


def in_order(row: torch.Tensor) -> list[int]:
    values = row.tolist()
    return sorted(range(len(values)), key=lambda token: (-values[token], token))


@given(SIZES, NUM_LEVELS, st.integers(0, 2**32), st.data())
def test_top_lists_the_first_ids_in_order(
    shape: tuple[int, int], levels: int, seed: int, data: st.DataObject
) -> None:
    logits = tied_logits(shape, levels, seed)
    count = data.draw(st.integers(1, shape[1]))

    ids = top(logits, count)

    assert ids.tolist() == [in_order(row)[:count] for row in logits]


@given(SIZES, NUM_LEVELS, st.integers(0, 2**32), st.data())
def test_what_leading_calls_sure_is_in_order_and_a_full_width_is_all_sure(
    shape: tuple[int, int], levels: int, seed: int, data: st.DataObject
) -> None:
    logits = tied_logits(shape, levels, seed)
    width = data.draw(st.integers(1, shape[1]))

    ids, sure = leading(logits, width)

    for row, found, count in zip(logits, ids.tolist(), sure.tolist(), strict=True):
        assert found[:count] == in_order(row)[:count]
        assert len(set(found)) == width
        assert count == width if width == shape[1] else count < width


@given(SIZES, NUM_LEVELS, st.integers(0, 2**32))
def test_the_leader_is_the_lowest_id_of_the_largest_logit(
    shape: tuple[int, int], levels: int, seed: int
) -> None:
    logits = tied_logits(shape, levels, seed)

    values, ids = leaders(logits)

    assert ids.tolist() == [in_order(row)[0] for row in logits]
    assert torch.equal(values, logits.amax(dim=-1))


def test_a_row_with_nan_has_nan_as_its_largest_logit() -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
    logits[1, 499] = torch.nan

    values, _ = leaders(logits)

    assert values.isnan().tolist() == [False, True, False]


def test_the_error_of_bad_logits_names_slot_value_limit_and_remedy() -> None:
    with pytest.raises(BadLogits, match=r"below 1e\+30, got slot 7: nan, slot 9: inf.*float32"):
        raise BadLogits((7, 9), (float("nan"), float("inf")))
