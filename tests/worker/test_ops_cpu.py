"""The fast CPU set against the oracle."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.worker.batches import RandomStep, make_step
from worker.ops.cpu import CpuOperations, filled_rows
from worker.ops.reference import ReferenceOperations
from worker.ops.table import NO_WINDOW, BatchInputs, HeadNorms, Operations

ROUNDING = {
    torch.float32: {"atol": 2e-5, "rtol": 1e-5},
    torch.bfloat16: {"atol": 3e-2, "rtol": 2e-2},
    torch.float16: {"atol": 4e-3, "rtol": 4e-3},
}
"""Sums of up to a few hundred numbers near 1, in another order; 16-bit results keep 8 and 11
bits and may round the other way after each of two operations."""

DTYPES = list(ROUNDING)


@pytest.fixture(autouse=True)
def _inference_on_one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, **ROUNDING[expected.dtype])


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attend(
    ops: Operations, step: RandomStep, *, window: int = NO_WINDOW, norms: HeadNorms | None = None
) -> tuple[Tensor, Tensor]:
    """What attention gives, and the pool after K and V were stored."""
    kv = step.kv.clone()
    ops.begin_step(step.batch, step.shape, step.block_size)
    q = ops.rotate_and_store(step.qkv.clone(), kv, step.batch, step.shape, step.cos_sin, norms)
    assert q.shape == (step.batch.num_tokens, step.shape.num_heads, step.shape.head_dim)
    return ops.paged_attention(q, kv, step.batch, step.shape, window), kv


def assert_attention_agrees(
    step: RandomStep, *, window: int = NO_WINDOW, norms: HeadNorms | None = None
) -> None:
    found, found_kv = attend(CpuOperations(), step, window=window, norms=norms)
    expected, expected_kv = attend(ReferenceOperations(), step, window=window, norms=norms)
    assert found.is_contiguous()
    assert_near(found, expected)
    assert_near(found_kv, expected_kv)


@settings(max_examples=60)
@given(
    slices=st.lists(
        st.tuples(st.integers(0, 90), st.one_of(st.just(1), st.integers(1, 40))),
        min_size=1,
        max_size=9,
    ),
    heads=st.sampled_from([(1, 1), (4, 4), (6, 3), (8, 2), (9, 3)]),
    head_dim=st.sampled_from([8, 16, 64]),
    block_size=st.sampled_from([1, 3, 8, 16, 32]),
    window=st.sampled_from([NO_WINDOW, NO_WINDOW, 1, 7, 33]),
    is_scattered=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_attention_agrees_on_any_mixture_of_slices(
    slices: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    window: int,
    is_scattered: bool,
    seed: int,
) -> None:
    step = make_step(
        slices,
        heads=heads,
        head_dim=head_dim,
        block_size=block_size,
        seed=seed,
        is_scattered=is_scattered,
    )
    assert_attention_agrees(step, window=window)


@pytest.mark.parametrize("window", [NO_WINDOW, 150])
def test_a_slice_longer_than_one_piece_agrees(window: int) -> None:
    assert_attention_agrees(make_step([(70, 300), (5, 129), (0, 128)]), window=window)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_agrees_in_every_type(dtype: torch.dtype) -> None:
    assert_attention_agrees(make_step([(30, 1), (0, 20), (64, 3), (31, 1)], dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_head_norms_agree(dtype: torch.dtype) -> None:
    norms = HeadNorms(random(16, dtype=dtype), random(16, dtype=dtype, seed=1), 1e-6)
    assert_attention_agrees(make_step([(30, 1), (0, 20)], dtype=dtype), norms=norms)


def alone(step: RandomStep, row: int) -> RandomStep:
    """The step with one of its slices only."""
    batch, offsets = step.batch, step.batch.slice_offsets.tolist()
    tokens = slice(offsets[row], offsets[row + 1])
    count = tokens.stop - tokens.start
    own = BatchInputs(
        token_ids=batch.token_ids[tokens],
        positions=batch.positions[tokens],
        cells=batch.cells[tokens],
        slice_offsets=torch.tensor([0, count], dtype=torch.int32),
        block_tables=batch.block_tables[row : row + 1].contiguous(),
        context_lens=batch.context_lens[row : row + 1],
        max_slice_len=count,
        max_context_len=int(batch.context_lens[row]),
    )
    return dataclasses.replace(step, batch=own, qkv=step.qkv[tokens])


@pytest.mark.parametrize("is_scattered", [False, True])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_company_changes_no_bit_of_attention(block_size: int, is_scattered: bool) -> None:
    lengths = np.random.default_rng(0).integers(1, 600, 12).tolist()
    slices = [*((length, 1) for length in lengths), (40, 30), (0, 150)]
    step = make_step(
        slices, heads=(9, 3), head_dim=64, block_size=block_size, is_scattered=is_scattered
    )
    together, _ = attend(CpuOperations(), step)

    offsets = step.batch.slice_offsets.tolist()
    for row in range(len(slices)):
        single, _ = attend(CpuOperations(), alone(step, row))
        assert single.equal(together[offsets[row] : offsets[row + 1]]), slices[row]


def test_company_changes_no_bit_of_a_linear_layer() -> None:
    ops = CpuOperations()
    linear = ops.pack_linear(random(96, 160), None)
    x = random(300, 160, seed=1)
    first = ops.linear(x[:1], linear)

    for rows in (2, 5, 16, 17, 33, 64, 65, 130, 300):
        assert ops.linear(x[:rows], linear)[:1].equal(first)


def test_cells_of_other_sequences_are_not_touched() -> None:
    step = make_step([(17, 1), (0, 5)])
    _, kv = attend(CpuOperations(), step)

    untouched = np.setdiff1d(np.arange(kv[0].shape[0] * 16), step.batch.cells.numpy())
    before, after = (pool.view(2, -1, 3, 16)[:, untouched] for pool in (step.kv, kv))
    assert before.equal(after)


def test_what_the_pool_holds_beyond_a_context_changes_nothing() -> None:
    step = make_step([(17, 1), (40, 1), (3, 6)])
    once, _ = attend(CpuOperations(), step)
    is_own = torch.zeros(step.kv.shape[1] * 16, dtype=torch.bool)
    for table, length in zip(
        step.batch.block_tables, step.batch.context_lens.tolist(), strict=True
    ):
        cells = (table[:, None] * 16 + torch.arange(16)).flatten()[:length]
        is_own[cells] = True
    step.kv.view(2, -1, 3, 16)[:, ~is_own] = 1e30

    assert attend(CpuOperations(), step)[0].equal(once)


def test_layers_of_different_windows_share_a_step() -> None:
    ops, step = CpuOperations(), make_step([(50, 1), (0, 40)])
    ops.begin_step(step.batch, step.shape, step.block_size)
    q = ops.rotate_and_store(step.qkv, step.kv, step.batch, step.shape, step.cos_sin, None)

    for window in (NO_WINDOW, 9, NO_WINDOW, 20):
        found = ops.paged_attention(q, step.kv, step.batch, step.shape, window)
        oracle = ReferenceOperations()
        assert_near(found, oracle.paged_attention(q, step.kv, step.batch, step.shape, window))


def test_another_batch_than_the_one_begun_is_refused() -> None:
    ops, step, other = CpuOperations(), make_step([(0, 4)]), make_step([(0, 5)])
    ops.begin_step(step.batch, step.shape, step.block_size)

    with pytest.raises(AssertionError, match="another batch"):
        attend_batch(ops, step, other.batch)


def attend_batch(ops: Operations, step: RandomStep, batch: BatchInputs) -> Tensor:
    return ops.rotate_and_store(step.qkv, step.kv, batch, step.shape, step.cos_sin, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 7, 64, 200])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_layers_agree(dtype: torch.dtype, rows: int, has_bias: bool) -> None:
    weight = random(37, 48, dtype=dtype) / 7
    bias = random(37, dtype=dtype, seed=1) if has_bias else None
    x = random(rows, 48, dtype=dtype, seed=2)
    fast, oracle = CpuOperations(), ReferenceOperations()

    found = fast.linear(x, fast.pack_linear(weight.clone(), bias))

    assert found.is_contiguous()
    assert_near(found, oracle.linear(x, oracle.pack_linear(weight, bias)))


def test_few_numbers_of_rows_are_computed_and_none_costs_much_more() -> None:
    filled = [filled_rows(rows) for rows in range(2049)]

    assert all(rows <= found <= 1.25 * rows for rows, found in enumerate(filled))
    assert filled[:17] == list(range(17))
    assert len(set(filled)) < 60
    assert all(filled_rows(found) == found for found in filled)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 33])
def test_norms_agree_and_move_the_residual_alike(dtype: torch.dtype, rows: int) -> None:
    x, residual = random(rows, 48, dtype=dtype), random(rows, 48, dtype=dtype, seed=1)
    weight = random(48, dtype=dtype, seed=2)
    fast, oracle = CpuOperations(), ReferenceOperations()
    assert_near(fast.rms_norm(x, weight, 1e-5), oracle.rms_norm(x, weight, 1e-5))

    moved, expected = residual.clone(), residual.clone()
    found = fast.add_rms_norm(x.clone(), moved, weight, 1e-5)
    assert_near(found, oracle.add_rms_norm(x, expected, weight, 1e-5))
    assert moved.equal(expected)


def test_a_norm_of_tiny_numbers_is_ruled_by_eps() -> None:
    x, weight = torch.full((2, 48), 1e-12), torch.ones(48)

    assert_near(
        CpuOperations().rms_norm(x, weight, 1e-5), ReferenceOperations().rms_norm(x, weight, 1e-5)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activations_agree(dtype: torch.dtype) -> None:
    gate_up = random(9, 100, dtype=dtype) * 4
    found = CpuOperations().gated_activation(gate_up.clone())

    assert found.is_contiguous()
    assert_near(found, ReferenceOperations().gated_activation(gate_up))


@pytest.mark.parametrize("first_id", [0, 20, 40])
def test_tokens_of_other_shards_embed_as_zeros(first_id: int) -> None:
    table = random(13, 8)
    token_ids = torch.tensor([0, 12, 13, 20, 32, 33, 40, 52, 53])

    found = CpuOperations().embedding(token_ids, table, first_id)

    assert found.equal(ReferenceOperations().embedding(token_ids, table, first_id))
    is_here = (token_ids >= first_id) & (token_ids < first_id + 13)
    assert found[is_here].equal(table[token_ids[is_here] - first_id])
    assert found[~is_here].eq(0).all()
