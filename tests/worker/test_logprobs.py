"""Log-probabilities: of raw logits, in float32, ranked in the fixed order."""

import numpy as np
import pytest
import torch

from scheduler.arrays import Int32Array, int32
from scheduler.plan import LogprobRows
from worker.logprobs import SLAB_ROWS, joined, score

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB_SIZE = 101


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return 4 * torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def scored(logits: torch.Tensor, tokens: list[int], num_top: list[int]) -> LogprobRows:
    count = len(tokens)
    return score(logits, int32(tokens), int32(num_top), numbers(count), numbers(count) + int32(5))


def numbers(count: int) -> Int32Array:
    return np.arange(count, dtype=np.int32)


def table(rows: LogprobRows) -> tuple[list[list[int]], np.ndarray]:
    """Ids and log-probabilities as [R, W]."""
    return rows.token.reshape(-1, rows.width).tolist(), rows.logprob.reshape(-1, rows.width)


def test_values_are_those_of_a_log_softmax_in_double_precision() -> None:
    logits = random_logits(10)
    reference = torch.log_softmax(logits.double(), dim=-1)

    rows = scored(logits, [3] * 10, [20] * 10)

    ids, values = table(rows)
    assert values.dtype == np.float32
    expected = reference.gather(1, torch.tensor(ids)).numpy()
    np.testing.assert_allclose(values, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_a_row_holds_its_token_and_then_the_most_probable_ones(num_top: int) -> None:
    logits = random_logits(6)
    best = logits.sort(dim=-1, descending=True).indices[:, :num_top]

    rows = scored(logits, [50] * 6, [num_top] * 6)

    assert rows.width == 1 + num_top
    ids, _ = table(rows)
    assert ids == [[50, *row] for row in best.tolist()]


def test_rank_says_how_many_tokens_come_first_and_agrees_with_the_alternatives() -> None:
    logits = torch.randint(0, 6, (40, VOCAB_SIZE), generator=torch.Generator().manual_seed(1))
    tokens = list(range(40))

    rows = scored(logits.float(), tokens, [20] * 40)

    ids, _ = table(rows)
    for row, (token, rank) in enumerate(zip(tokens, rows.rank.tolist(), strict=True)):
        values = logits[row].tolist()
        order = sorted(range(VOCAB_SIZE), key=lambda each: (-values[each], each))
        assert order[rank - 1] == token
        assert ids[row][1:] == order[:20]


def test_columns_that_a_row_did_not_ask_for_hold_no_token() -> None:
    rows = scored(random_logits(3), [1, 2, 3], [0, 2, 1])

    ids, values = table(rows)
    assert [[token != -1 for token in row] for row in ids] == [
        [True, False, False],
        [True, True, True],
        [True, True, False],
    ]
    assert (np.array(ids) == -1).tolist() == np.isneginf(values).tolist()


def test_a_token_that_the_model_rules_out_has_no_probability_and_no_nan() -> None:
    logits = torch.full((1, VOCAB_SIZE), -torch.inf)
    logits[0, 7] = 2.0

    ids, values = table(scored(logits, [3], [2]))

    assert ids == [[3, 7, 0]]
    assert values.tolist() == [[-np.inf, 0.0, -np.inf]]


@pytest.mark.parametrize("vocab_size", [101, 128, 999])
def test_a_row_is_scored_to_the_same_bits_alone_and_among_others(vocab_size: int) -> None:
    count = 2 * SLAB_ROWS + 3
    generator = torch.Generator().manual_seed(3)
    logits = 5 * torch.randn(count, vocab_size, generator=generator)
    tokens = list(range(count))[::-1]
    together = scored(logits, [token % vocab_size for token in tokens], [5] * count)
    ids, values = table(together)

    for row in range(0, count, 7):
        alone = scored(logits[row : row + 1], [tokens[row] % vocab_size], [5])
        assert alone.token.tolist() == ids[row]
        assert alone.logprob.tobytes() == values[row].tobytes()
        assert alone.rank[0] == together.rank[row]


def test_chunks_of_a_prompt_join_to_what_one_piece_gives() -> None:
    logits = random_logits(9)
    tokens, asked, row = numbers(9) + 3, int32([4] * 9), int32([2] * 9)
    whole = score(logits, tokens, asked, row, numbers(9))
    pieces = [
        score(logits[part], tokens[part], asked[part], row[part], numbers(9)[part])
        for part in (slice(5, 9), slice(0, 2), slice(2, 5))
    ]

    together = joined(pieces)

    assert together is not None
    for name in ("row", "position", "width", "token", "logprob", "rank"):
        assert np.array_equal(getattr(together, name), getattr(whole, name)), name


def test_parts_of_different_width_join_by_row_and_position() -> None:
    logits = random_logits(2)
    wide = score(logits[:1], int32([1]), int32([3]), int32([4]), int32([9]))
    narrow = score(logits[1:], int32([2]), int32([0]), int32([1]), int32([6]))

    together = joined([wide, narrow])

    assert together is not None
    assert together.row.tolist() == [1, 4]
    assert together.position.tolist() == [6, 9]
    ids, values = table(together)
    assert ids[0] == [2, -1, -1, -1]
    assert ids[1] == wide.token.tolist()
    assert values[1].tolist() == wide.logprob.tolist()
    assert together.token.dtype == np.int32
    assert together.logprob.dtype == np.float32


def test_nothing_joins_to_nothing() -> None:
    empty = score(random_logits(0), int32([]), int32([]), int32([]), int32([]))

    assert joined([]) is None
    assert joined([empty]) is None
