"""The bits of a token's attention are its own: whatever way its step was cut, and in any format."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcache.geometry import blocks_for
from tests.worker.ops.native.random_tensors import assert_near, random
from worker.kv_store import head_width
from worker.ops.cpu import CpuOperations
from worker.ops.reference import ReferenceOperations
from worker.ops.table import AttentionShape, BatchInputs
from worker.window import NO_WINDOW

FORMATS = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
fuzzed = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


def shape_of(heads: tuple[int, int], head_dim: int) -> AttentionShape:
    return AttentionShape(
        num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, scale=head_dim**-0.5
    )


def make_batch(slices: Sequence[tuple[int, int, int]], tables: Tensor) -> BatchInputs:
    """Slices as (sequence, first token, tokens); a sequence of -1 is padding."""
    rows = [max(sequence, 0) for sequence, _, _ in slices]
    counts = torch.tensor([count for _, _, count in slices])
    ends = [0 if sequence < 0 else first + count for sequence, first, count in slices]
    offsets = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
    nothing = torch.zeros(int(counts.sum()), dtype=torch.int64)
    return BatchInputs(
        token_ids=nothing,
        positions=nothing,
        cells=nothing,
        slice_offsets=offsets,
        block_tables=tables[rows].contiguous(),
        context_lens=torch.tensor(ends).int(),
        max_slice_len=int(counts.max()),
        max_context_len=max(ends),
    )


class Pool:
    """K/V of some sequences of the same length, in blocks dealt at random; the rest is NaN."""

    def __init__(
        self, kv: Tensor, shape: AttentionShape, block_size: int, dtype: torch.dtype, seed: int = 0
    ) -> None:
        """kv: [2, sequences, length, num_kv_heads, head width], as the pool holds them."""
        _, num, length, heads, width = kv.shape
        self.shape, self.block_size = shape, block_size
        blocks = blocks_for(length, block_size)
        order = torch.randperm(num * blocks + 2, generator=torch.Generator().manual_seed(seed))
        self.tables = order[: num * blocks].int().view(num, blocks)
        pool = torch.full((2, num * blocks + 2, block_size, heads, width), -1, dtype=torch.int8)
        if dtype != torch.int8:
            pool = torch.full(pool.shape, float("nan"), dtype=dtype)
        for sequence in range(num):
            for block, index in enumerate(self.tables[sequence].tolist()):
                part = kv[:, sequence, block * block_size : (block + 1) * block_size]
                pool[:, index, : part.shape[1]] = part
        self.kv = pool

    def attend(
        self,
        ops: CpuOperations,
        q: Tensor,
        slices: Sequence[tuple[int, int, int]],
        window: int = NO_WINDOW,
    ) -> list[Tensor]:
        """Per slice [tokens, num_heads * head_dim]. q: [sequences, length, heads, head_dim]"""
        batch = make_batch(slices, self.tables)
        ops.begin_step(batch, self.shape, self.block_size)
        rows = torch.cat([q[sequence, first : first + n] for sequence, first, n in slices])
        out = ops.paged_attention(rows, self.kv, batch, self.shape, window)
        return [out[start:end] for start, end in pairwise(batch.slice_offsets.tolist())]


def as_held(ops: CpuOperations, kv: Tensor, shape: AttentionShape, dtype: torch.dtype) -> Tensor:
    """Heads [..., num_kv_heads, head_dim] as `rotate_and_store` writes them, by way of V."""
    *others, heads, head_dim = kv.shape
    flat = kv.reshape(-1, heads * head_dim)
    num_tokens = flat.shape[0]
    pool = torch.zeros(2, 1, num_tokens, heads, head_width(head_dim, dtype), dtype=dtype)
    qk = torch.zeros(num_tokens, (shape.num_heads + heads) * head_dim)
    cells = torch.arange(num_tokens)
    batch = BatchInputs(
        token_ids=cells,
        positions=torch.zeros_like(cells),
        cells=cells,
        slice_offsets=torch.tensor([0, num_tokens]).int(),
        block_tables=torch.zeros(1, 1).int(),
        context_lens=torch.tensor([num_tokens]).int(),
        max_slice_len=num_tokens,
        max_context_len=num_tokens,
    )
    ops.begin_step(batch, shape, num_tokens)
    qkv = torch.cat((qk, flat), dim=1)
    ops.rotate_and_store(qkv, pool, batch, shape, torch.zeros(1, head_dim), None)
    return pool[1, 0].view(*others, heads, -1)


def as_floats(held: Tensor, head_dim: int) -> Tensor:
    if held.dtype != torch.int8:
        return held.float()
    scales = held[..., head_dim:].contiguous().view(torch.float32)
    return held[..., :head_dim].float() * scales


def make_pool(
    ops: CpuOperations,
    *,
    length: int,
    sequences: int = 1,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> tuple[Pool, Tensor]:
    """And queries [sequences, length, heads, head_dim]."""
    shape = shape_of(heads, head_dim)
    kv = as_held(ops, random(2, sequences, length, heads[1], head_dim, seed=1), shape, dtype)
    return Pool(kv, shape, block_size, dtype), random(sequences, length, heads[0], head_dim)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("window", [NO_WINDOW, 70])
def test_a_decode_and_any_chunking_give_the_same_bits(
    ops: CpuOperations, dtype: torch.dtype, window: int
) -> None:
    pool, q = make_pool(ops, length=333, dtype=dtype)

    (whole,) = pool.attend(ops, q, [(0, 0, 333)], window)
    chunks = pool.attend(ops, q, [(0, 0, 1), (0, 1, 130), (0, 131, 61), (0, 192, 141)], window)
    decodes = pool.attend(ops, q, [(0, token, 1) for token in range(333)], window)
    alone = [pool.attend(ops, q, [(0, token, 1)], window)[0] for token in (0, 63, 128, 332)]

    assert whole.isfinite().all()
    assert torch.cat(chunks).equal(whole)
    assert torch.cat(decodes).equal(whole)
    assert torch.cat(alone).equal(whole[[0, 63, 128, 332]])


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_size_and_order_of_blocks_change_no_bit(ops: CpuOperations, dtype: torch.dtype) -> None:
    found = []
    for block_size in (1, 3, 16, 100, 128):
        pool, q = make_pool(ops, length=260, block_size=block_size, dtype=dtype)
        found.append(torch.cat(pool.attend(ops, q, [(0, 40, 220), (0, 7, 1)])))

    for other in found[1:]:
        assert other.equal(found[0])


@pytest.mark.parametrize("heads", [(2, 2), (9, 3), (32, 1)])
def test_threads_that_share_one_long_context_change_no_bit(
    ops: CpuOperations, more_threads: CpuOperations, heads: tuple[int, int]
) -> None:
    pool, q = make_pool(ops, length=1500, sequences=2, heads=heads, head_dim=16)
    for slices in ([(0, 1499, 1)], [(1, 700, 1), (0, 1490, 5)], [(0, 1300, 130), (1, 1400, 1)]):
        for window in (NO_WINDOW, 600):
            alone = pool.attend(ops, q, slices, window)
            shared = pool.attend(more_threads, q, slices, window)
            assert torch.cat(shared).equal(torch.cat(alone)), (slices, window)


@fuzzed
@given(
    slices=st.lists(
        st.tuples(st.integers(-1, 2), st.integers(0, 299), st.integers(1, 160)),
        min_size=1,
        max_size=6,
    ),
    heads=st.sampled_from([(1, 1), (5, 5), (9, 3), (32, 4), (32, 1), (10, 2)]),
    head_dim=st.sampled_from([8, 16, 20, 64, 80, 96, 130, 256]),
    block_size=st.sampled_from([1, 5, 16, 64, 128]),
    window=st.sampled_from([NO_WINDOW, NO_WINDOW, 1, 64, 200]),
    dtype=st.sampled_from(FORMATS),
)
def test_any_step_agrees_with_the_oracle_and_padding_is_zero(
    ops: CpuOperations,
    more_threads: CpuOperations,
    slices: list[tuple[int, int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    window: int,
    dtype: torch.dtype,
) -> None:
    length = 300
    slices = [(sequence, first, min(n, length - first)) for sequence, first, n in slices]
    sizes = {"heads": heads, "head_dim": head_dim, "block_size": block_size, "dtype": dtype}
    pool, q = make_pool(ops, length=length, sequences=3, **sizes)  # type: ignore[arg-type]  # above

    found = pool.attend(ops, q, slices, window)

    assert torch.cat(pool.attend(more_threads, q, slices, window)).equal(torch.cat(found))
    wide = torch.zeros(*pool.kv.shape[:4], head_dim)
    for index in pool.tables.flatten().tolist():
        wide[:, index] = as_floats(pool.kv[:, index], head_dim).nan_to_num()
    for (sequence, first, count), part in zip(slices, found, strict=True):
        if sequence < 0:
            assert not part.any()
            continue
        batch = make_batch([(sequence, first, count)], pool.tables)
        rows = q[sequence, first : first + count]
        expected = ReferenceOperations().paged_attention(rows, wide, batch, pool.shape, window)
        assert_near(part, expected)


@pytest.mark.parametrize("head_dim", [8, 20, 64, 100])
def test_an_int8_head_is_off_by_half_a_step_at_most(ops: CpuOperations, head_dim: int) -> None:
    shape = shape_of((2, 2), head_dim)
    kv = random(50, 2, head_dim) * torch.logspace(-20, 20, 50)[:, None, None]
    kv[7] = 0.0

    found = as_floats(as_held(ops, kv, shape, torch.int8), head_dim)

    step = kv.abs().amax(dim=-1, keepdim=True) / 127
    assert ((found - kv).abs() <= 0.501 * step).all()
    assert not found[7].any()
    peak = kv.abs().argmax(dim=-1, keepdim=True)
    torch.testing.assert_close(found.gather(-1, peak), kv.gather(-1, peak), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [8, 20, 64])
def test_16_bit_heads_are_rounded_as_torch_rounds(
    ops: CpuOperations, dtype: torch.dtype, head_dim: int
) -> None:
    kv = random(60, 2, head_dim) * torch.logspace(-8, 4.5, 60)[:, None, None]
    kv[0, 0, :3] = torch.tensor([float("inf"), float("-inf"), float("nan")])

    found = as_held(ops, kv, shape_of((2, 2), head_dim), dtype)

    torch.testing.assert_close(found, kv.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_int8_attention_stays_near_float32(ops: CpuOperations) -> None:
    wide, q = make_pool(ops, length=400)
    narrow, _ = make_pool(ops, length=400, dtype=torch.int8)

    expected = torch.cat(wide.attend(ops, q, [(0, 0, 400)]))
    error = torch.cat(narrow.attend(ops, q, [(0, 0, 400)])) - expected

    # Steps of a head are 2% of its spread; K's and V's errors are spread evenly over half of one.
    assert error.square().mean().sqrt() < 0.015 * expected.square().mean().sqrt()


def test_weights_are_exact_to_a_few_units_in_the_last_place(ops: CpuOperations) -> None:
    """Of two keys, one scores x less than the other; its value alone is 1."""
    shape = AttentionShape(num_heads=1, num_kv_heads=1, head_dim=8, scale=1.0)
    less = torch.linspace(0, 87, 2000)
    kv = torch.zeros(2, len(less), 2, 1, 8)
    kv[0, :, 1, 0, 0] = -less
    kv[1, :, 1, 0, :] = 1.0
    q = torch.ones(len(less), 2, 1, 8)
    pool = Pool(kv, shape, 2, torch.float32)

    found = torch.cat(pool.attend(ops, q, [(row, 1, 1) for row in range(len(less))]))

    expected = torch.sigmoid(-less.double())
    assert ((found[:, 0].double() / expected - 1).abs() < 4e-7).all()


def test_scores_of_any_size_give_no_nan(ops: CpuOperations) -> None:
    pool, q = make_pool(ops, length=200)

    for scale in (1e-30, 1e4, 1e18):
        assert torch.cat(pool.attend(ops, scale * q, [(0, 0, 200), (0, 199, 1)])).isfinite().all()
