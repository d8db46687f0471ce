"""Linear layers over packed float weights, on every level that this machine runs."""

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from worker.ops.native.structs import (
    Batch,
    Code,
    EmbeddingArgs,
    LinearArgs,
    operation,
    pointer,
)
from worker.ops.native.team import FORMATS, Team, as_array, levels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

pytestmark = pytest.mark.parametrize("level", levels())


@pytest.fixture(autouse=True)
def _one_thread_of_torch() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def team(level: str, num_threads: int = 2) -> Team:
    return Team(num_threads, level)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def multiply(team: Team, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, with not a number around the result, which must stay there."""
    packed = team.pack(weight, weight.dtype)
    return multiply_packed(team, x, packed, weight, bias)


def multiply_packed(
    team: Team, x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    out_features, in_features = weight.shape
    margin = 128
    room = torch.full((x.shape[0] * out_features + 2 * margin,), torch.nan)
    out = room[margin:-margin].view(x.shape[0], out_features)
    num_bytes = team.linear_scratch_bytes(x.shape[0], in_features, weight.dtype)
    scratch = torch.full((num_bytes,), 0xFF, dtype=torch.uint8)  # not a number, as floats
    args = LinearArgs(
        pointer(x),
        pointer(packed),
        pointer(bias),
        pointer(out),
        in_features,
        out_features,
        FORMATS[weight.dtype],
        0,
        pointer(scratch) if num_bytes else None,
    )
    team.run(as_array([operation(Code.LINEAR, args)]), Batch(num_tokens=x.shape[0]))
    assert room[:margin].isnan().all()
    assert room[-margin:].isnan().all()
    return out.clone()


def assert_right(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *, splits: bool
) -> None:
    """Against float64. A chain of k multiply-adds errs by at most k roundings of what the
    magnitudes add up to (Higham 2002, "Accuracy and Stability of Numerical Algorithms", 3.1).

    Args:
        splits: values of x are split in two bfloat16, each rounded to 8 bits; twice as many
            products are added then.
    """
    expected = x.double() @ weight.double().T
    most = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        expected, most = expected + bias.double(), most + bias.double().abs()
    bound = (weight.shape[1] + 1) * 2**-24 * most
    if splits:
        bound = 2 * bound + 2**-16 * most
    assert ((out.double() - expected).abs() <= bound).all()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 70),
    in_features=st.one_of(st.integers(1, 40), st.integers(1, 1300)),
    out_features=st.one_of(st.integers(1, 40), st.integers(1, 300)),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
@example(1, 1, 1, torch.bfloat16, True, 2, 0)
@example(7, 321, 65, torch.float32, True, 2, 0)
@example(250, 643, 33, torch.float16, False, 2, 0)
def test_any_shape_is_as_in_float64(
    level: str,
    rows: int,
    in_features: int,
    out_features: int,
    dtype: torch.dtype,
    has_bias: bool,
    num_threads: int,
    seed: int,
) -> None:
    x, weight = (
        random(rows, in_features, seed=seed),
        random(out_features, in_features, dtype=dtype, seed=seed + 1),
    )
    bias = random(out_features, seed=seed + 2) if has_bias else None
    out = multiply(team(level, num_threads), x, weight, bias)
    splits = level == "amx" and dtype is torch.bfloat16
    assert_right(out, x, weight, bias, splits=splits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features"), [(48, 576), (77, 1409), (130, 31)])
def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads(
    level: str, dtype: torch.dtype, out_features: int, in_features: int
) -> None:
    x = random(260, in_features)
    weight, bias = random(out_features, in_features, dtype=dtype, seed=1), random(out_features)
    packed = team(level).pack(weight, dtype)
    alone = torch.cat([multiply_packed(team(level), row[None], packed, weight, bias) for row in x])
    for rows in (*range(2, 27), 32, 61, 119, 121, 128, 241, 260):
        together = multiply_packed(team(level), x[-rows:].contiguous(), packed, weight, bias)
        assert torch.equal(together, alone[-rows:]), f"among {rows} rows"
    for num_threads in (1, 3):
        again = multiply_packed(team(level, num_threads), x, packed, weight, bias)
        assert torch.equal(again, alone), f"{num_threads} threads"


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_packed_alike_by_any_number_of_threads(level: str, dtype: torch.dtype) -> None:
    weight = random(333, 47, dtype=dtype)
    packed = [team(level, num_threads).pack(weight, dtype) for num_threads in (1, 2, 3)]
    assert torch.equal(packed[0], packed[1])
    assert torch.equal(packed[0], packed[2])


@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_columns_of_a_packed_weight_can_be_read_back_in_any_format(
    level: str, dtype: torch.dtype, to: torch.dtype
) -> None:
    num_ids, width = 203, 35
    table = random(num_ids, width, dtype=dtype)
    packed = team(level).pack(table, to)
    ids = torch.arange(-2, num_ids + 2)
    out = torch.full((num_ids + 4, width), torch.nan)
    args = EmbeddingArgs(
        pointer(packed), pointer(out), 0, num_ids, width, FORMATS[to], is_packed=True
    )
    batch = Batch(num_tokens=num_ids + 4, token_ids=pointer(ids))
    team(level).run(as_array([operation(Code.EMBEDDING, args)]), batch)
    assert torch.equal(out[2:-2], table.to(to).float())
    assert not out[:2].any()
    assert not out[-2:].any()


def test_every_16_bit_number_is_multiplied_as_what_it_is(level: str) -> None:
    """Subnormal numbers and infinities too; what is not a number gives what is not one. With AMX
    the former count as 0, and infinities are multiplied with a lower half of 0."""
    for dtype in (torch.bfloat16, torch.float16):
        weight = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)[:, None]
        out = multiply(team(level), torch.ones(1, 1), weight)
        expected = weight[:, 0].float()
        if level == "amx" and dtype is torch.bfloat16:
            expected[expected.abs() < torch.finfo(torch.float32).tiny] = 0.0
            expected[expected.isinf()] = torch.nan
        torch.testing.assert_close(out[0], expected, rtol=0, atol=0, equal_nan=True)


def test_what_is_not_a_number_stays_in_its_row_and_column(level: str) -> None:
    x, weight = random(9, 70), random(50, 70, seed=1)
    clean = multiply(team(level), x, weight)
    x[4, 3] = torch.nan
    weight[17, 69] = torch.inf
    out = multiply(team(level), x, weight)
    touched = torch.zeros(9, 50, dtype=torch.bool)
    touched[4, :], touched[:, 17] = True, True
    assert torch.equal(out.isfinite(), ~touched)
    assert torch.equal(out[~touched], clean[~touched])
