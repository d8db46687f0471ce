"""Penalties, bias and bans, against transformers where it has them."""

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from scheduler.arrays import NO_INT32, int32
from scheduler.plan import Admission
from scheduler.sampling import SamplingParams
from worker.edits import FOR_EVER, SequenceEdits, edit, fallback

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB_SIZE = 60
PARIS = [7, 7, 7]


def sequence_edits(
    params: SamplingParams, num_prompt: int = 3, end_ids: tuple[int, ...] = ()
) -> SequenceEdits:
    return SequenceEdits(
        Admission(slot=0, sampling=params, num_prompt=num_prompt, blocks=NO_INT32, end_ids=end_ids)
    )


def edited(logits: torch.Tensor, edits: SequenceEdits, tokens: list[int]) -> torch.Tensor:
    """One row's logits after the edits, for the token that follows `tokens`."""
    changed = logits[None].clone()
    edit(changed, [edits], [len(tokens)], [int32([*tokens, -1, -1])])
    return changed[0]


def table(seed: int = 0) -> torch.Tensor:
    """[V, V] a model of one token's memory: row t holds the logits after token t."""
    return 2 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def greedy_steps(edits: SequenceEdits, prompt: list[int], steps: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(steps):
        tokens.append(int(edited(table()[tokens[-1]], edits, tokens).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("penalty", [0.7, 1.1, 1.3, 2.0])
def test_repetition_penalty_equals_transformers_for_30_steps_of_prompt_and_output(
    penalty: float,
) -> None:
    edits = sequence_edits(SamplingParams(repetition_penalty=penalty))
    reference = RepetitionPenaltyLogitsProcessor(penalty)
    tokens = list(PARIS)

    for step in range(30):
        logits = table()[(tokens[-1] + step) % VOCAB_SIZE]
        ours = edited(logits, edits, tokens)
        theirs = reference(torch.tensor([tokens]), logits[None].clone())[0]
        assert torch.equal(ours, theirs)
        tokens.append(int(ours.argmax()))

    assert len(set(tokens)) > 10, "the walk must visit several tokens to show anything"


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    logits = table()[0]
    edits = sequence_edits(SamplingParams(presence_penalty=2.0, frequency_penalty=0.5))

    first = edited(logits, edits, PARIS)
    later = edited(logits, edits, [*PARIS, 9, 7, 9])

    assert torch.equal(first, logits)
    expected = logits.clone()
    expected[9] -= 2.0 + 2 * 0.5
    expected[7] -= 2.0 + 0.5
    torch.testing.assert_close(later, expected, rtol=0, atol=1e-6)


def test_a_negative_presence_penalty_favours_what_was_said() -> None:
    logits = table()[0]

    changed = edited(logits, sequence_edits(SamplingParams(presence_penalty=-2.0)), [*PARIS, 9])

    assert changed[9] == logits[9] + 2.0


def test_logit_bias_is_added_after_penalties_as_in_transformers() -> None:
    bias = {4: 2.5, 9: -100.0, 7: 1.0}
    edits = sequence_edits(SamplingParams(logit_bias=bias, repetition_penalty=1.3))
    tokens = torch.tensor([PARIS])
    expected = RepetitionPenaltyLogitsProcessor(1.3)(tokens, table()[:1].clone())
    expected = SequenceBiasLogitsProcessor([[[k], v] for k, v in bias.items()])(tokens, expected)

    assert torch.equal(edited(table()[0], edits, PARIS), expected[0])


def test_only_allowed_tokens_stay() -> None:
    edits = sequence_edits(SamplingParams(allowed_token_ids=[9, 4, 9, 30]))

    changed = edited(table()[0], edits, PARIS)

    assert changed.isfinite().nonzero()[:, 0].tolist() == [4, 9, 30]
    assert torch.equal(changed[[4, 9, 30]], table()[0][[4, 9, 30]])


def test_bias_counts_among_the_allowed_and_bans_stand_above_both() -> None:
    params = SamplingParams(
        allowed_token_ids=[4, 9, 30], logit_bias={4: 50.0, 9: 100.0}, bad_word_ids=[[9]]
    )

    changed = edited(table()[0], sequence_edits(params), PARIS)

    assert int(changed.argmax()) == 4
    assert changed[9] == -torch.inf


def test_bad_words_equal_transformers_within_the_output() -> None:
    words = [[5], [8, 9], [8, 8, 10], [1, 2, 3, 4]]
    edits = sequence_edits(SamplingParams(bad_word_ids=words), num_prompt=1)
    reference = NoBadWordsLogitsProcessor(words, eos_token_id=0)
    generator = np.random.default_rng(0)

    for _ in range(300):
        output = generator.choice([1, 2, 3, 8, 8], size=generator.integers(0, 7)).tolist()
        logits = table()[0]
        theirs = reference(torch.tensor([[50, *output]]), logits[None].clone())[0]
        assert torch.equal(edited(logits, edits, [50, *output]), theirs)


def test_a_bad_word_that_began_in_the_prompt_is_not_produced_and_not_banned() -> None:
    edits = sequence_edits(SamplingParams(bad_word_ids=[[7, 9]]))

    assert torch.equal(edited(table()[0], edits, PARIS), table()[0])
    assert edited(table()[0], edits, [*PARIS, 7])[9] == -torch.inf


def test_min_tokens_bans_end_and_stop_ids_as_transformers_does() -> None:
    edits = sequence_edits(
        SamplingParams(min_tokens=4, max_tokens=9, stop_token_ids=[11]), end_ids=(2, 5)
    )
    reference = MinNewTokensLengthLogitsProcessor(len(PARIS), 4, [2, 5, 11])
    for length in range(8):
        tokens = [*PARIS, *[20] * length]
        theirs = reference(torch.tensor([tokens]), table()[:1].clone())[0]
        assert torch.equal(edited(table()[0], edits, tokens), theirs)


def test_min_tokens_holds_off_end_ids_under_ignore_eos_too() -> None:
    params = SamplingParams(min_tokens=2, ignore_eos=True)

    changed = edited(table()[0], sequence_edits(params, end_ids=(2,)), PARIS)

    assert changed[2] == -torch.inf


def test_edits_end_with_min_tokens_unless_something_lasting_is_asked() -> None:
    nothing = SamplingParams(top_p=0.5, temperature=0.7, stop_token_ids=[4])
    guarded = SamplingParams(min_tokens=5, stop_token_ids=[4])
    biased = SamplingParams(min_tokens=5, stop_token_ids=[4], logit_bias={1: 1.0})

    assert sequence_edits(nothing).active_until == 0
    assert sequence_edits(guarded).active_until == 3 + 5
    assert sequence_edits(SamplingParams(min_tokens=5)).active_until == 0
    assert sequence_edits(biased).active_until == FOR_EVER


def test_each_row_is_edited_as_if_it_were_alone() -> None:
    asked = [
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(presence_penalty=1.0, frequency_penalty=-0.3),
        SamplingParams(logit_bias={3: 5.0}),
        SamplingParams(allowed_token_ids=[1, 2, 3]),
        SamplingParams(bad_word_ids=[[4], [7, 8]]),
        SamplingParams(min_tokens=9, stop_token_ids=[6]),
        SamplingParams(repetition_penalty=0.8, logit_bias={7: 1.0}, bad_word_ids=[[7]]),
    ]
    tokens = [np.random.default_rng(row).integers(0, 12, 8).tolist() for row in range(7)]
    together = table()[:7].clone()

    edit(
        together,
        [sequence_edits(each) for each in asked],
        [8] * 7,
        [int32(each) for each in tokens],
    )

    for row, params in enumerate(asked):
        alone = edited(table()[row], sequence_edits(params), tokens[row])
        assert torch.equal(together[row], alone)


def test_the_fallback_is_the_models_best_among_the_allowed_lowest_id_first() -> None:
    logits = torch.tensor([1.0, 5.0, 3.0, 3.0, -torch.inf])

    assert fallback(logits, None) == 1
    assert fallback(logits, np.array([0, 2, 3])) == 2
    assert fallback(torch.full((5,), -torch.inf), np.array([3, 4])) == 3


def test_penalties_steer_a_greedy_walk_out_of_its_loop() -> None:
    free = greedy_steps(sequence_edits(SamplingParams()), PARIS, 40)
    held = greedy_steps(
        sequence_edits(SamplingParams(frequency_penalty=2.0, presence_penalty=2.0)), PARIS, 40
    )

    assert len(set(held)) > len(set(free))
