"""Which hidden states score prompt tokens, however a prompt is cut."""

import numpy as np
import pytest
import torch

from scheduler.arrays import int32
from scheduler.plan import Admission
from scheduler.sampling import SamplingParams
from worker.batch import Slices
from worker.prompt_scores import PromptScores


def admit(scores: PromptScores, slot: int, num_prompt: int, asked: int | None = 2) -> None:
    sampling = SamplingParams(temperature=0.0, seed=0, prompt_logprobs=asked)
    scores.admit(Admission(slot=slot, sampling=sampling, num_prompt=num_prompt, blocks=int32([0])))


def make_slices(*rows: tuple[int, int, int]) -> Slices:
    """Slices as (slot, start, count)."""
    slot, start, count = (int32(column) for column in zip(*rows, strict=True))
    offsets = np.concatenate(([0], np.cumsum(count))).astype(np.int32)
    return Slices(slot, start, count, np.ones(len(rows), dtype=np.bool_), offsets)


def score(scores: PromptScores, slices: Slices) -> list[tuple[int, int, float]]:
    """(slice, position, position of the hidden state that scores it) of each scored token;
    a hidden state is made to say its own position."""
    positions = np.concatenate(
        [np.arange(s, s + n) for s, n in zip(slices.start, slices.count, strict=True)]
    )
    wanted = scores.wanted(slices)
    hidden = torch.from_numpy(positions[wanted].astype(np.float32))[:, None]
    found = scores.collect(slices, hidden)
    if found is None:
        return []
    assert found.num_top.tolist() == [2] * len(found.position)
    rows = zip(found.slice_row.tolist(), found.position.tolist(), strict=True)
    return [(*row, state) for row, state in zip(rows, found.hidden[:, 0].tolist(), strict=True)]


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 9, 10, 11])
def test_each_prompt_token_is_scored_once_from_the_position_before(chunk: int) -> None:
    scores = PromptScores(4)
    admit(scores, 3, num_prompt=10)
    found = []
    for start in range(0, 10, chunk):
        found += score(scores, make_slices((3, start, min(chunk, 10 - start))))

    assert found == [(0, position, position - 1) for position in range(1, 10)]
    assert scores.num_kept == 0


def test_output_tokens_are_not_scored() -> None:
    scores = PromptScores(4)
    admit(scores, 0, num_prompt=4)

    # As after a preemption: prompt and output come back in one slice.
    assert [position for _, position, _ in score(scores, make_slices((0, 0, 9)))] == [1, 2, 3]
    assert score(scores, make_slices((0, 9, 1))) == []


def test_only_sequences_that_asked_are_scored() -> None:
    scores = PromptScores(4)
    admit(scores, 0, num_prompt=3, asked=None)
    admit(scores, 1, num_prompt=3)

    found = score(scores, make_slices((0, 0, 3), (1, 0, 3)))

    assert [row for row, _, _ in found] == [1, 1]


def test_a_released_sequence_leaves_nothing_to_the_next_one_in_its_slot() -> None:
    scores = PromptScores(4)
    admit(scores, 2, num_prompt=10)
    score(scores, make_slices((2, 0, 5)))
    assert scores.num_kept == 1

    scores.release(int32([2]))
    admit(scores, 2, num_prompt=3)

    assert scores.num_kept == 0
    assert score(scores, make_slices((2, 0, 3))) == [(0, 1, 0), (0, 2, 1)]
