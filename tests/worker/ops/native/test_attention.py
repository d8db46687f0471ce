"""Attention of the native set, against the oracle."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.worker.ops.native.random_tensors import assert_near
from tests.worker.ops.random_steps import RandomStep, make_step
from worker.ops.cpu import CpuOperations
from worker.ops.reference import ReferenceOperations
from worker.ops.table import BatchInputs, Operations
from worker.window import NO_WINDOW


def attend(ops: Operations, step: RandomStep, *, window: int = NO_WINDOW) -> tuple[Tensor, Tensor]:
    """What attention gives, and the pool after K and V were stored."""
    kv = step.kv.clone()
    ops.begin_step(step.batch, step.shape, step.block_size)
    q = ops.rotate_and_store(step.qkv.clone(), kv, step.batch, step.shape, step.cos_sin, None)
    return ops.paged_attention(q, kv, step.batch, step.shape, window), kv


def assert_attention_agrees(
    ops: CpuOperations, step: RandomStep, *, window: int = NO_WINDOW
) -> None:
    """The oracle attends over the K and V that were stored, rounded as they are."""
    oracle = ReferenceOperations()
    found, kv = attend(ops, step, window=window)
    q = step.qkv.clone()
    heads = oracle.rotate_and_store(q, kv.float(), step.batch, step.shape, step.cos_sin, None)
    expected = oracle.paged_attention(heads, kv.float(), step.batch, step.shape, window)
    assert found.is_contiguous()
    assert_near(found, expected)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    ops: CpuOperations,
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
    assert_attention_agrees(ops, step, window=window)


@pytest.mark.parametrize("window", [NO_WINDOW, 150])
def test_a_slice_longer_than_one_piece_agrees(ops: CpuOperations, window: int) -> None:
    assert_attention_agrees(ops, make_step([(70, 300), (5, 129), (0, 128)]), window=window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_agrees_in_every_format(ops: CpuOperations, dtype: torch.dtype) -> None:
    slices = [(30, 1), (0, 20), (64, 3), (31, 1)]
    assert_attention_agrees(ops, make_step(slices, kv_dtype=dtype))


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
def test_company_and_threads_change_no_bit_of_attention(
    ops: CpuOperations, more_threads: CpuOperations, block_size: int, is_scattered: bool
) -> None:
    lengths = np.random.default_rng(0).integers(1, 600, 12).tolist()
    slices = [*((length, 1) for length in lengths), (40, 30), (0, 150)]
    step = make_step(
        slices, heads=(9, 3), head_dim=64, block_size=block_size, is_scattered=is_scattered
    )
    together, _ = attend(ops, step)

    assert together.equal(attend(more_threads, step)[0])
    offsets = step.batch.slice_offsets.tolist()
    for row in range(len(slices)):
        single, _ = attend(ops, alone(step, row))
        assert single.equal(together[offsets[row] : offsets[row + 1]]), slices[row]


def test_what_the_pool_holds_beyond_a_context_changes_nothing(ops: CpuOperations) -> None:
    step = make_step([(17, 1), (40, 1), (3, 6)])
    once, _ = attend(ops, step)
    is_own = torch.zeros(step.kv.shape[1] * 16, dtype=torch.bool)
    for table, length in zip(
        step.batch.block_tables, step.batch.context_lens.tolist(), strict=True
    ):
        cells = (table[:, None] * 16 + torch.arange(16)).flatten()[:length]
        is_own[cells] = True
    step.kv.view(2, -1, 3, 16)[:, ~is_own] = 1e30

    assert attend(ops, step)[0].equal(once)


def test_layers_of_different_windows_share_a_step(ops: CpuOperations) -> None:
    step, oracle = make_step([(50, 1), (0, 40)]), ReferenceOperations()
    ops.begin_step(step.batch, step.shape, step.block_size)
    q = ops.rotate_and_store(step.qkv, step.kv, step.batch, step.shape, step.cos_sin, None)

    for window in (NO_WINDOW, 9, NO_WINDOW, 20):
        found = ops.paged_attention(q, step.kv, step.batch, step.shape, window)
        assert_near(found, oracle.paged_attention(q, step.kv, step.batch, step.shape, window))
