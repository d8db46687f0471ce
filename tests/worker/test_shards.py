"""Dealing a model out to tensor-parallel ranks."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.shards import (
    ALIGNMENT,
    ImpossibleShards,
    ModelWidths,
    Shard,
    Span,
    deal,
    deal_aligned,
    deal_shards,
    legal_sizes,
)

SMOLLM2 = ModelWidths(num_q_heads=9, num_kv_heads=3, mlp_columns=1536, vocab_rows=49152)


@st.composite
def any_widths(draw: st.DrawFn) -> ModelWidths:
    num_kv_heads = draw(st.integers(1, 16))
    return ModelWidths(
        num_q_heads=num_kv_heads * draw(st.integers(1, 12)),
        num_kv_heads=num_kv_heads,
        mlp_columns=draw(st.integers(1, 20_000)),
        vocab_rows=draw(st.integers(1, 200_000)),
    )


@st.composite
def any_shards(draw: st.DrawFn) -> tuple[ModelWidths, tuple[Shard, ...]]:
    widths = draw(any_widths())
    return widths, deal_shards(widths, draw(st.sampled_from(legal_sizes(widths))))


def assert_covers(spans: list[Span], count: int) -> None:
    assert spans[0].start == 0
    assert spans[-1].stop == count
    assert all(a.stop == b.start for a, b in itertools.pairwise(spans))
    assert all(span.size >= 1 for span in spans)


@given(count=st.integers(0, 10_000), num_hands=st.integers(1, 100))
def test_hands_differ_by_at_most_one_and_the_first_have_more(count: int, num_hands: int) -> None:
    sizes = [span.size for span in deal(count, num_hands)]

    assert sum(sizes) == count
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(count=st.integers(1, 300_000), num_hands=st.integers(1, 64))
def test_aligned_hands_cover_everything_and_are_nearly_even(count: int, num_hands: int) -> None:
    spans = deal_aligned(count, num_hands)
    sizes = [span.size for span in spans]

    assert sum(sizes) == count
    assert all(a.stop == b.start for a, b in itertools.pairwise(spans))
    assert max(sizes) - min(sizes) <= max(1, 2 * ALIGNMENT, count // num_hands // 8)


def test_wide_tensors_are_cut_only_at_aligned_places() -> None:
    spans = deal_aligned(49_155, 7)

    assert all(span.start % ALIGNMENT == 0 for span in spans)
    assert spans[-1].stop == 49_155


def test_narrow_tensors_are_dealt_evenly_rather_than_aligned() -> None:
    assert [span.size for span in deal_aligned(64, 3)] == [22, 21, 21]


@given(dealt=any_shards())
def test_every_query_head_column_and_row_belongs_to_exactly_one_rank(
    dealt: tuple[ModelWidths, tuple[Shard, ...]],
) -> None:
    widths, shards = dealt

    assert_covers([s.q_heads for s in shards], widths.num_q_heads)
    assert_covers([s.mlp_columns for s in shards], widths.mlp_columns)
    assert_covers([s.vocab_rows for s in shards], widths.vocab_rows)
    assert [s.rank for s in shards] == list(range(len(shards)))
    assert all(s.size == len(shards) for s in shards)


@given(dealt=any_shards())
def test_a_rank_holds_the_kv_heads_that_its_query_heads_read_and_no_others(
    dealt: tuple[ModelWidths, tuple[Shard, ...]],
) -> None:
    widths, shards = dealt
    group = widths.num_q_heads // widths.num_kv_heads

    for shard in shards:
        read = {head // group for head in range(shard.q_heads.start, shard.q_heads.stop)}
        assert read == set(range(shard.kv_heads.start, shard.kv_heads.stop))
        assert shard.q_heads.size % shard.kv_heads.size == 0


@given(widths=any_widths(), size=st.integers(-2, 300))
def test_a_size_is_refused_exactly_if_it_is_not_among_the_legal_ones(
    widths: ModelWidths, size: int
) -> None:
    if size in legal_sizes(widths):
        assert len(deal_shards(widths, size)) == size
    else:
        with pytest.raises(ImpossibleShards, match=f"tensor_parallel_size={size} "):
            deal_shards(widths, size)


@given(widths=any_widths())
def test_every_size_up_to_the_kv_heads_is_legal_if_there_is_enough_to_deal(
    widths: ModelWidths,
) -> None:
    most = min(widths.num_kv_heads, widths.mlp_columns, widths.vocab_rows)

    assert set(range(1, most + 1)) <= set(legal_sizes(widths))


def test_two_ranks_share_three_kv_heads_unevenly() -> None:
    first, second = deal_shards(SMOLLM2, 2)

    assert (first.kv_heads, first.q_heads) == (Span(0, 2), Span(0, 6))
    assert (second.kv_heads, second.q_heads) == (Span(2, 3), Span(6, 9))
    assert (first.mlp_columns, second.mlp_columns) == (Span(0, 768), Span(768, 1536))
    assert (first.vocab_rows, second.vocab_rows) == (Span(0, 24576), Span(24576, 49152))


def test_beyond_the_kv_heads_each_is_replicated_and_its_query_heads_are_dealt_out() -> None:
    widths = ModelWidths(num_q_heads=8, num_kv_heads=2, mlp_columns=64, vocab_rows=100)

    shards = deal_shards(widths, 4)

    assert [s.kv_heads for s in shards] == [Span(0, 1), Span(0, 1), Span(1, 2), Span(1, 2)]
    assert [s.q_heads for s in shards] == [Span(0, 2), Span(2, 4), Span(4, 6), Span(6, 8)]


def test_a_size_that_cannot_work_is_refused_with_those_that_do() -> None:
    with pytest.raises(ImpossibleShards) as refusal:
        deal_shards(SMOLLM2, 4)

    assert refusal.value.legal_sizes == (1, 2, 3, 9)
    assert "9 query heads, 3 KV heads" in str(refusal.value)
    assert "one of 1, 2, 3, 9." in str(refusal.value)


def test_no_rank_is_left_without_columns_or_rows() -> None:
    widths = ModelWidths(num_q_heads=8, num_kv_heads=8, mlp_columns=3, vocab_rows=100)

    assert legal_sizes(widths) == (1, 2, 3)


def test_query_heads_that_kv_heads_cannot_share_evenly_are_refused() -> None:
    with pytest.raises(ValueError, match="9 query heads cannot share 4 KV heads"):
        ModelWidths(num_q_heads=9, num_kv_heads=4, mlp_columns=8, vocab_rows=8)


def test_a_width_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ModelWidths(num_q_heads=1, num_kv_heads=1, mlp_columns=0, vocab_rows=8)
