"""Embedding, norms, rotation and activation of the native set, against the oracle."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.worker.ops.native.random_tensors import assert_near, random
from tests.worker.ops.random_steps import RandomStep, make_step
from worker.ops.cpu import CpuOperations
from worker.ops.native.structs import Batch, pointer
from worker.ops.native.team import as_array
from worker.ops.reference import ReferenceOperations
from worker.ops.table import HeadNorms, Operations

ORACLE = ReferenceOperations()
FORMATS = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = st.one_of(st.integers(1, 70), st.sampled_from([96, 100, 256, 576]))
ROWS = st.one_of(st.integers(0, 9), st.sampled_from([33, 130]))
fuzzed = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@fuzzed
@given(rows=ROWS, width=WIDTHS, seed=st.integers(0, 99))
def test_norms_agree_and_move_the_residual_alike(
    ops: CpuOperations, rows: int, width: int, seed: int
) -> None:
    x, residual = random(rows, width, seed=seed), random(rows, width, seed=seed + 1)
    weight = random(width, seed=seed + 2)
    before = x.clone()
    assert_near(ops.rms_norm(x, weight, 1e-5), ORACLE.rms_norm(x, weight, 1e-5))
    assert x.equal(before)

    moved, expected = residual.clone(), residual.clone()
    found = ops.add_rms_norm(x.clone(), moved, weight, 1e-5)

    assert_near(found, ORACLE.add_rms_norm(x, expected, weight, 1e-5))
    assert moved.equal(expected), "a sum of two is rounded once: the same bits"


@pytest.mark.parametrize("scale", [1e-12, 1e15])
def test_a_norm_of_tiny_numbers_is_ruled_by_eps_and_one_of_large_ones_is_finite(
    ops: CpuOperations, scale: float
) -> None:
    x, weight = scale * random(2, 48), random(48, seed=1)

    assert_near(ops.rms_norm(x, weight, 1e-5), ORACLE.rms_norm(x, weight, 1e-5))


@fuzzed
@given(rows=ROWS, columns=WIDTHS, seed=st.integers(0, 99))
def test_gated_activations_agree(ops: CpuOperations, rows: int, columns: int, seed: int) -> None:
    gate_up = 4 * random(rows, 2 * columns, seed=seed)

    found = ops.gated_activation(gate_up.clone())

    assert found.is_contiguous()
    assert_near(found, ORACLE.gated_activation(gate_up))


def test_a_gate_far_from_zero_shuts_or_opens_without_a_nan(ops: CpuOperations) -> None:
    gates = [-200.0, -100.0, -88.0, -87.0, 0.0, 87.0, 88.0, 89.0, 200.0, 1e30, -1e30]
    gate_up = torch.tensor([[*gates, *[3.0] * len(gates)]])

    found = ops.gated_activation(gate_up)

    torch.testing.assert_close(found, ORACLE.gated_activation(gate_up), atol=1e-35, rtol=1e-5)


@fuzzed
@given(
    rows=ROWS,
    num_ids=st.integers(1, 50),
    width=WIDTHS,
    first_id=st.sampled_from([0, 20]),
    dtype=st.sampled_from(FORMATS),
    is_packed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_embeddings_are_the_tables_rows_and_zeros_for_other_shards(
    ops: CpuOperations,
    rows: int,
    num_ids: int,
    width: int,
    first_id: int,
    dtype: torch.dtype,
    is_packed: bool,
    seed: int,
) -> None:
    table = random(num_ids, width, dtype=dtype, seed=seed)
    pack = ops.pack_linear if is_packed else lambda rows, bias: ops.pack_embedding(rows)
    ids = torch.randint(0, 90, (rows,), generator=torch.Generator().manual_seed(seed))

    found = ops.embedding(ids, pack(table.clone(), None), first_id)

    expected = ORACLE.embedding(ids, ORACLE.pack_linear(table.float(), None), first_id)
    assert found.equal(expected)


def rotate(ops: Operations, step: RandomStep, norms: HeadNorms | None) -> tuple[Tensor, Tensor]:
    """The query heads, and the pool after K and V were stored."""
    kv = step.kv.clone()
    ops.begin_step(step.batch, step.shape, step.block_size)
    q = ops.rotate_and_store(step.qkv.clone(), kv, step.batch, step.shape, step.cos_sin, norms)
    assert q.shape == (step.batch.num_tokens, step.shape.num_heads, step.shape.head_dim)
    return q, kv


@fuzzed
@given(
    heads=st.sampled_from([(1, 1), (4, 4), (6, 3), (9, 3), (7, 1)]),
    head_dim=st.sampled_from([2, 8, 10, 16, 24, 64, 80, 128]),
    block_size=st.sampled_from([1, 3, 16]),
    dtype=st.sampled_from(FORMATS),
    has_norms=st.booleans(),
    seed=st.integers(0, 99),
)
def test_heads_are_rotated_and_stored_as_the_oracle_does(
    ops: CpuOperations,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    has_norms: bool,
    seed: int,
) -> None:
    step = make_step(
        [(30, 1), (0, 9), (64, 3), (31, 1)],
        heads=heads,
        head_dim=head_dim,
        block_size=block_size,
        kv_dtype=dtype,
        seed=seed,
    )
    norms = HeadNorms(random(head_dim, seed=1), random(head_dim, seed=2), 1e-6)

    q, kv = rotate(ops, step, norms if has_norms else None)

    expected_q, expected_kv = rotate(ORACLE, step.widened(), norms if has_norms else None)
    assert_near(q, expected_q)
    # Rounded once from what was near already: at most to the next number.
    spacing = max(float(torch.finfo(dtype).eps), 1e-5)
    torch.testing.assert_close(kv.float(), expected_kv, atol=2e-5, rtol=spacing)
    untouched = torch.ones(kv.shape[1] * block_size, dtype=torch.bool)
    untouched[step.batch.cells] = False
    assert kv.flatten(1, 2)[:, untouched].equal(step.kv.flatten(1, 2)[:, untouched])
    v = step.qkv.view(len(step.qkv), -1, head_dim)[:, -heads[1] :]
    assert kv.flatten(1, 2)[1, step.batch.cells].equal(v.to(dtype)), "V is rounded and copied"


def test_padding_writes_nothing_to_the_pool(ops: CpuOperations) -> None:
    step = make_step([(17, 1), (0, 5)])
    step.batch.cells[:] = -1

    assert rotate(ops, step, None)[1].equal(step.kv)


@pytest.mark.parametrize("rows", [1, 3, 16, 70])
def test_a_rows_bits_depend_on_that_row_alone(
    ops: CpuOperations, more_threads: CpuOperations, rows: int
) -> None:
    wide, weight = random(rows, 600), random(600, seed=1)
    table, ids = ops.pack_linear(random(90, 600, seed=2), None), torch.arange(rows)
    step = make_step([(5, 1)] * (rows - 1) + [(3, 4)], heads=(9, 3), head_dim=64)
    q, kv = rotate(ops, step, None)

    assert all(
        found.equal(again)
        for found, again in zip((q, kv), rotate(more_threads, step, None), strict=True)
    )
    for other in (ops, more_threads):
        for row in range(rows):
            alone = wide[row : row + 1]
            assert ops.gated_activation(alone).equal(other.gated_activation(wide)[row : row + 1])
            assert ops.rms_norm(alone, weight, 1e-5).equal(
                other.rms_norm(wide, weight, 1e-5)[row : row + 1]
            )
            assert ops.embedding(ids[row : row + 1], table, 0).equal(
                other.embedding(ids, table, 0)[row : row + 1]
            )


@fuzzed
@given(rows=st.integers(1, 70), width=WIDTHS, wanted=st.lists(st.integers(0, 69), max_size=40))
def test_what_follows_taken_rows_is_done_for_those_alone(
    ops: CpuOperations, rows: int, width: int, wanted: list[int]
) -> None:
    x, weight = random(rows, width), random(width, seed=1)
    index = torch.tensor([row % rows for row in wanted], dtype=torch.int64)
    with ops.recording(max_rows=70) as recording:
        taken = ops.take_rows(x, index)
        normed = ops.rms_norm(taken, weight, 1e-5)
    taken[:], normed[:] = -1, -1

    batch = Batch(num_tokens=rows, num_wanted=len(wanted), wanted=pointer(index))
    ops.team.run(as_array(recording.operations), batch)

    assert taken[: len(wanted)].equal(x[index])
    assert_near(normed[: len(wanted)], ORACLE.rms_norm(x[index], weight, 1e-5))
    assert taken[len(wanted) :].eq(-1).all()
    assert normed[len(wanted) :].eq(-1).all()


def test_another_batch_than_the_one_begun_is_refused(ops: CpuOperations) -> None:
    step, other = make_step([(0, 4)]), make_step([(0, 5)])
    ops.begin_step(step.batch, step.shape, step.block_size)

    with pytest.raises(AssertionError, match="another batch"):
        ops.rotate_and_store(step.qkv, step.kv, other.batch, step.shape, step.cos_sin, None)
