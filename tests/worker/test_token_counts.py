"""Counts of a growing sequence, against counting it anew."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scheduler.arrays import int32
from worker.token_counts import TokenCounts


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=400),
    st.integers(0, 400),
    st.sets(st.integers(0, 400)),
)
def test_counting_bit_by_bit_equals_counting_anew(
    tokens: list[int], num_prompt: int, stops: set[int]
) -> None:
    num_prompt = min(num_prompt, len(tokens))
    counts = TokenCounts(num_prompt)

    for end in sorted({min(stop, len(tokens)) for stop in stops} | {len(tokens)}):
        counts.count_up_to(end, int32(tokens))
        in_output = Counter(tokens[num_prompt:end])

        found = dict(zip(counts.ids.tolist(), counts.in_output.tolist(), strict=True))
        assert found == {token: in_output[token] for token in set(tokens[:end])}


def test_a_token_once_counted_is_not_read_again() -> None:
    counts = TokenCounts(num_prompt=2)
    tokens = int32([5, 6, 7, 8])
    counts.count_up_to(3, tokens)
    tokens[:3] = 99

    counts.count_up_to(4, tokens)

    assert np.array_equal(counts.ids, [5, 6, 7, 8])
    assert np.array_equal(counts.in_output, [0, 0, 1, 1])
