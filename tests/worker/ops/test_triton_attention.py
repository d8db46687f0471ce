"""Paged attention in Triton against the oracle, and its promise of equal bits in any company.

On a CPU Triton's interpreter runs the kernels, hence the small shapes; on a GPU the same
tests run them compiled.
"""

import random
from dataclasses import replace
from math import ceil

import pytest
import torch
from torch import Tensor

from tests.worker.ops.batches import Step, make_shape, make_step
from tests.worker.ops.interpreted import DEVICE, HAS_GPU
from worker.ops.cuda import CudaOperations, check_sizes
from worker.ops.reference import ReferenceOperations
from worker.ops.triton import decode, splits
from worker.window import NO_WINDOW

TOLERANCE = {
    # Sums of a few hundred products of numbers of size 1, in another order.
    torch.float32: 2e-5,
    # The oracle rounds once, to 2**-8 (2**-11) of results below 4. The kernels also round the
    # weights, whose errors average out, so twice that is left.
    torch.bfloat16: 2 * 4 * 2.0**-8,
    torch.float16: 2 * 4 * 2.0**-11,
}
GROUPS = ((1, 1), (4, 2), (3, 1), (9, 3), (7, 1), (8, 1))
HEAD_DIMS = (64, 80, 96, 128, 256)


def attend(step: Step, window: int = NO_WINDOW, ops: CudaOperations | None = None) -> Tensor:
    ops = ops or CudaOperations()
    ops.begin_step(step.batch, step.shape, step.kv.shape[2])
    return ops.paged_attention(step.q, step.kv, step.batch, step.shape, window)


def assert_near_oracle(step: Step, window: int = NO_WINDOW) -> None:
    wanted = ReferenceOperations().paged_attention(step.q, step.kv, step.batch, step.shape, window)
    got = attend(step, window)
    assert got.dtype == step.q.dtype
    assert got.is_contiguous()
    difference = (got.float() - wanted.float()).abs().max().item()
    assert difference <= TOLERANCE[step.q.dtype], f"off by {difference}"


def make(slices: list[tuple[int, int]], **kwargs: object) -> Step:
    shape = make_shape(*kwargs.pop("heads", (6, 2)), kwargs.pop("head_dim", 64))
    return make_step(slices, shape, device=DEVICE, **kwargs)


@pytest.mark.slow
def test_many_random_mixed_steps_match_the_oracle() -> None:
    for seed in range(100, 600 if HAS_GPU else 140):
        check_random_step(seed)


@pytest.mark.parametrize("seed", range(12))
def test_random_mixed_steps_match_the_oracle(seed: int) -> None:
    check_random_step(seed)


def check_random_step(seed: int) -> None:
    choose = random.Random(seed)
    most = 2000 if HAS_GPU else 90
    slices = []
    for _ in range(choose.randint(1, 4)):
        context = choose.randint(1, most)
        slices.append((choose.choice((1, min(context, choose.randint(1, 40)))), context))
    step = make(
        slices,
        heads=choose.choice(GROUPS),
        head_dim=choose.choice(HEAD_DIMS),
        block_size=choose.choice((8, 16, 32)),
        dtype=choose.choice(tuple(TOLERANCE)),
        seed=seed,
    )
    assert_near_oracle(step, window=choose.choice((NO_WINDOW, 1, 7, 16, 50)))


@pytest.mark.parametrize("window", [NO_WINDOW, 300, 600])
def test_a_decode_of_several_parts_matches_the_oracle(window: int) -> None:
    assert_near_oracle(make([(1, 700), (1, 257), (1, 256), (1, 1)], heads=(2, 1)), window)


def test_parts_grow_once_there_are_as_many_as_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MIN_SPLIT", 32)
    monkeypatch.setattr(splits, "MIN_SPLIT", 32)
    monkeypatch.setattr(decode, "max_splits", lambda num_kv_heads: 4)
    assert_near_oracle(make([(1, 127), (1, 129), (1, 203)], heads=(3, 1)))


def test_a_long_chunk_spans_several_tiles() -> None:
    assert_near_oracle(make([(45, 100), (70, 70)], heads=(3, 1)))


def test_sequences_may_share_blocks() -> None:
    step = make([(1, 40), (5, 45)])
    step.batch.block_tables[1, :2] = step.batch.block_tables[0, :2]
    assert_near_oracle(step)


def test_a_window_of_one_sees_only_the_token_itself() -> None:
    step = make([(1, 20), (3, 9)], heads=(1, 1))
    batch = step.batch
    values = step.kv[1].reshape(-1, step.shape.head_dim)[batch.cells]
    assert torch.allclose(attend(step, window=1), values, atol=1e-6)


def test_padded_decodes_yield_zeros_and_change_nobody() -> None:
    padded = make([(1, 30), (1, 12), (1, 0), (1, 0)], seed=3)
    real = replace(
        padded,
        q=padded.q[:2],
        batch=replace(
            padded.batch,
            slice_offsets=padded.batch.slice_offsets[:3],
            block_tables=padded.batch.block_tables[:2],
            context_lens=padded.batch.context_lens[:2],
        ),
    )

    out = attend(padded)

    assert torch.equal(out[:2], attend(real))
    assert not out[2:].any()


def test_what_lies_in_cells_beyond_the_context_is_never_seen() -> None:
    step = make([(1, 19), (4, 21)])
    before = attend(step)
    for row, context in enumerate((19, 21)):
        last = step.batch.block_tables[row, context // 16]
        step.kv[:, last, context % 16 :] = float("nan")
    assert torch.equal(attend(step), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_gets_the_same_bits_alone_and_in_any_company(dtype: torch.dtype) -> None:
    slices = [(1, 300), (1, 31), (20, 64), (1, 513), (7, 7), (1, 1)]
    step = make(slices, heads=(3, 1), dtype=dtype)
    together = attend(step)
    for row in range(len(slices)):
        first, end = step.batch.slice_offsets[row : row + 2].tolist()
        assert torch.equal(attend(step.only(row)), together[first:end]), f"slice {slices[row]}"


def test_a_looser_bound_on_contexts_changes_no_bit() -> None:
    step = make([(1, 300), (1, 20)], heads=(3, 1))
    loose = replace(step, batch=replace(step.batch, max_context_len=5000, max_slice_len=1))
    assert torch.equal(attend(loose), attend(step))


def test_the_number_of_processors_changes_no_bit() -> None:
    step = make([(1, 600), (1, 20)], heads=(2, 2))
    many = CudaOperations()
    many._num_processors = 132
    few = CudaOperations()
    few._num_processors = 1
    assert torch.equal(attend(step, ops=many), attend(step, ops=few))


@pytest.mark.gpu  # numpy's product, the interpreter's, gives a row other bits in another place
@pytest.mark.parametrize("cut", [2, 16, 33, 38])
def test_where_a_prompt_is_cut_changes_no_bit(cut: int) -> None:
    whole = make([(40, 60)], heads=(3, 1))
    batch = whole.batch
    first = replace(
        whole,
        q=whole.q[:cut],
        batch=replace(
            batch,
            slice_offsets=torch.tensor([0, cut], dtype=torch.int32, device=DEVICE),
            context_lens=batch.context_lens - 40 + cut,
        ),
    )
    rest = replace(
        whole,
        q=whole.q[cut:],
        batch=replace(
            batch,
            slice_offsets=torch.tensor([0, 40 - cut], dtype=torch.int32, device=DEVICE),
        ),
    )
    assert torch.equal(torch.cat((attend(first), attend(rest))), attend(whole))


def test_parts_cover_each_decode_and_nothing_else() -> None:
    contexts = [1, 255, 256, 257, 5000, 100_000, 0]
    step = make([(1, context) for context in contexts[:4]] + [(3, 400)])
    step = replace(
        step,
        batch=replace(
            step.batch,
            slice_offsets=torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 10], dtype=torch.int32).to(DEVICE),
            context_lens=torch.tensor([*contexts, 400], dtype=torch.int32).to(DEVICE),
            max_context_len=100_000,
        ),
    )
    plan = decode.plan_decodes(step.batch, step.shape, NO_WINDOW, torch.bfloat16)

    count = int(plan.items[0])
    items = plan.items[1 : 1 + count].tolist()
    parts = [sum(item // plan.most_splits == row for item in items) for row in range(8)]
    tile = plan.tiles.keys
    for context, num_parts in zip(contexts, parts, strict=False):
        length = max(splits.MIN_SPLIT, ceil(ceil(context / plan.most_splits) / tile) * tile)
        assert num_parts == max(1, ceil(context / length))
        assert num_parts <= splits.bound_splits(context, plan.most_splits)
    assert parts[7] == 0, "a chunk is no decode"
    assert items == sorted(set(items))


def test_heads_and_blocks_that_kernels_do_not_take_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="head sizes from 16 to 256, the model has 512"):
        check_sizes(make_shape(head_dim=512), 16)
    with pytest.raises(ValueError, match="at most 128 query heads per K/V head, the model has 256"):
        check_sizes(make_shape(256, 1), 16)
    with pytest.raises(ValueError, match=r"block_size 8, 16, .* got 12"):
        check_sizes(make_shape(), 12)
