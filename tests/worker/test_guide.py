"""Matchers beside the sampler: what may follow, when a sequence ends, and when it fails."""

import json
import threading
from functools import cache

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from scheduler.arrays import NO_INT32, Int32Array, int32
from scheduler.plan import Admission
from scheduler.sampling import SamplingParams
from worker import guide as guide_module
from worker.grammar import GrammarFailed, new_matcher, read_tokenizer
from worker.guide import Guide, allowed_ids, unpacked_here, unpacked_there
from worker.sampler import SampledRows, Sampler

pytestmark = pytest.mark.usefixtures("one_thread")

END, STOP_A, STOP_B = 0, 1, 2
VOCAB_SIZE = 300
"""More than the tokenizer has, as models pad their embeddings."""
PROMPT = [5, 6]
DIGITS = "start: /[0-9]{1,3}/"
ENDLESS = 'start: "endless"'


@cache
def raw_tokenizer() -> Tokenizer:
    """One token per byte, three that end, and some of two letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|endoftext|>": END, "<stop-a>": STOP_A, "<stop-b>": STOP_B}
    for letter in (*alphabet, "ab", "12"):
        vocab[letter] = len(vocab)
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("1", "2")]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|endoftext|>", "<stop-a>", "<stop-b>"])
    return raw


@cache
def tokenizer() -> LLTokenizer:
    return read_tokenizer(raw_tokenizer().to_str(), VOCAB_SIZE)


def ids(text: str) -> list[int]:
    return raw_tokenizer().encode(text).ids


class Sequence:
    """One guided sequence, sampled greedily from logits of the test's choice."""

    def __init__(self, grammar: str, output: str = "", **sampling: object) -> None:
        self.tokens = [*PROMPT, *ids(output)]
        self.sampler = Sampler(1, VOCAB_SIZE, "cpu", guide=Guide(lambda: tokenizer(), VOCAB_SIZE))
        end_ids = sampling.pop("end_ids", (END,))
        assert isinstance(end_ids, tuple)
        fields = {"temperature": 0.0, "max_tokens": None, "grammar": grammar, **sampling}
        self.sampler.admit(
            Admission(
                slot=0,
                sampling=SamplingParams(**fields),  # type: ignore[arg-type]
                num_prompt=len(PROMPT),
                blocks=NO_INT32,
                end_ids=end_ids,
            )
        )

    def sample(self, wish: str | int = "") -> SampledRows:
        """One step of a model that would like to say `wish`, and next to it whatever."""
        logits = torch.arange(VOCAB_SIZE, 0, -1).float() / VOCAB_SIZE
        for token in [wish] if isinstance(wish, int) else ids(wish):
            logits[token] = 10.0
        slots, positions = int32([0]), int32([len(self.tokens)])
        history = log_of([self.tokens])
        self.sampler.prepare(slots, positions, history)
        return self.sampler.sample(logits[None], slots, positions, history)

    def say(self, wish: str | int = "") -> int:
        """`sample`, and append the token."""
        found = self.sample(wish)
        assert not found.failed
        self.tokens.append(int(found.token[0]))
        return self.tokens[-1]

    @property
    def text(self) -> str:
        return raw_tokenizer().decode(self.tokens[len(PROMPT) :])


def log_of(rows: list[list[int]]) -> Int32Array:
    """Token logs with nonsense behind what is known."""
    log = np.full((len(rows), 64), 299, dtype=np.int32)
    for row, tokens in enumerate(rows):
        log[row, : len(tokens)] = tokens
    return log


# --- what may follow ------------------------------------------------------------------------


def test_only_what_the_grammar_allows_is_sampled() -> None:
    sequence = Sequence(DIGITS)

    assert sequence.say("x") in range(VOCAB_SIZE)
    assert sequence.text in "0123456789"
    assert sequence.say("7") == ids("7")[0]


def test_ids_beyond_the_tokenizer_are_never_allowed() -> None:
    """The model has more rows than the tokenizer has tokens."""
    assert raw_tokenizer().get_vocab_size() < VOCAB_SIZE - 1
    sequence = Sequence(r"start: /(.|\n)*/")

    assert sequence.say(VOCAB_SIZE - 1) != VOCAB_SIZE - 1


def test_a_character_may_be_put_together_from_its_bytes() -> None:
    """Case 52: no token of this tokenizer holds more than a byte of it."""
    text = "👩‍👩‍👧 東京"
    sequence = Sequence(json.dumps({"grammars": [{"json_schema": {"enum": [text]}}]}))

    while sequence.say(0) != END:
        pass

    assert sequence.text == json.dumps(text, ensure_ascii=False)


def test_words_become_a_row_of_flags() -> None:
    words = np.array([[1 | 1 << 31], [1 << 3]], dtype=np.uint32).view(np.int32)

    assert torch.equal(unpacked_here(words), unpacked_there(words, torch.device("cpu")))
    wide = allowed_ids(words, 40, torch.device("cpu"))
    narrow = allowed_ids(words, 4, torch.device("cpu"))

    assert wide.nonzero().tolist() == [[0, 0], [0, 31], [1, 3]]
    assert narrow.nonzero().tolist() == [[0, 0], [1, 3]]


def test_a_step_mixes_guided_rows_and_free_ones() -> None:
    guide = Guide(lambda: tokenizer(), VOCAB_SIZE)
    sampler = Sampler(4, VOCAB_SIZE, "cpu", guide=guide)
    free = SamplingParams(temperature=0.0)
    for slot, sampling in (
        (3, SamplingParams(temperature=0.0, grammar='start: "b"')),
        (0, free),
        (2, SamplingParams(temperature=0.0, grammar='start: "a"')),
        (1, SamplingParams(temperature=0.0, logit_bias={7: 100.0})),
    ):
        sampler.admit(
            Admission(slot=slot, sampling=sampling, num_prompt=2, blocks=NO_INT32, end_ids=(END,))
        )
    slots, positions = int32([1, 3, 0, 2]), int32([2, 2, 2, 2])
    logits = torch.zeros(4, VOCAB_SIZE)
    logits[:, 50] = 5.0

    sampler.prepare(slots, positions, log_of([PROMPT] * 4))
    found = sampler.sample(logits, slots, positions, log_of([PROMPT] * 4))

    assert found.token.tolist() == [7, *ids("b"), 50, *ids("a")]
    for slot in (2, 3):
        sampler.release(slot)
    assert guide.num_guided == 0


def test_penalties_and_bias_weigh_what_the_grammar_allows() -> None:
    (b,) = ids("b")

    assert Sequence('start: "a" | "b"', logit_bias={b: 50.0}).say("a") == b
    assert Sequence('start: ("a" | "b"){4}', "a", frequency_penalty=2.0).say() == b


# --- where a sequence ends ------------------------------------------------------------------


def test_a_complete_grammar_leaves_end_tokens_alone() -> None:
    sequence = Sequence('start: "ab"')
    while sequence.text != "ab":
        sequence.say("x")

    assert sequence.say("x") == END


def test_an_open_end_is_the_models_choice() -> None:
    assert Sequence(DIGITS, "1").say(END) == END
    assert Sequence(DIGITS, "1").say("9") == ids("9")[0]
    assert Sequence(DIGITS).say(END) != END


@pytest.mark.parametrize("end_ids", [(STOP_A,), (STOP_B, STOP_A), (STOP_A, END)])
def test_end_tokens_are_those_of_the_request(end_ids: tuple[int, ...]) -> None:
    """llguidance would take <|endoftext|> by its name."""
    for end in (END, STOP_A, STOP_B):
        said = Sequence('start: "1"', "1", end_ids=end_ids).say(end)
        assert said == end if end in end_ids else said in end_ids


def test_stop_token_ids_may_end_a_document_too() -> None:
    assert Sequence(DIGITS, "1", stop_token_ids=[STOP_B]).say(STOP_B) == STOP_B
    assert Sequence(DIGITS, stop_token_ids=[STOP_B]).say(STOP_B) != STOP_B


def test_ignore_eos_goes_on_while_the_grammar_does_and_no_longer() -> None:
    sequence = Sequence(DIGITS, "1", ignore_eos=True)

    assert sequence.say(END) != END
    assert sequence.say(END) != END
    assert len(sequence.text) == 3
    assert sequence.say("5") == END


def test_min_tokens_give_way_to_the_end_of_the_grammar() -> None:
    sequence = Sequence(DIGITS, min_tokens=10)

    said = [sequence.say(END) for _ in range(4)]

    assert END not in said[:3]
    assert said[3] == END


def test_a_document_that_is_complete_ends_whatever_is_banned() -> None:
    digits = [ids(digit)[0] for digit in "0123456789"]
    for sampling in ({"allowed_token_ids": digits}, {"bad_word_ids": [[END]]}):
        sequence = Sequence('start: "1"', "1", **sampling)
        assert sequence.say("1") == END


def test_a_matcher_is_not_fed_the_end_token() -> None:
    """Case 46: with two plans in flight the step after the end is computed as well."""
    sequence = Sequence(DIGITS, "1")
    assert sequence.say(END) == END

    late = sequence.sample("x")

    assert not late.failed


# --- when it cannot go on -------------------------------------------------------------------


def test_bans_that_leave_nothing_fail_the_sequence_alone() -> None:
    (a,) = ids("a")

    found = Sequence('start: "b" "b"', allowed_token_ids=[a]).sample("b")

    assert list(found.failed) == [0]
    assert "leave no token that the grammar allows" in found.failed[0]


def test_a_failed_sequence_reports_no_logprobs() -> None:
    found = Sequence('start: "b"', allowed_token_ids=ids("a"), logprobs=2).sample("b")

    assert found.failed
    assert found.logprobs is None


def test_a_grammar_without_an_end_token_fails_when_it_is_complete() -> None:
    found = Sequence('start: "1"', "1", end_ids=()).sample("1")

    assert "no end token" in found.failed[0]


def test_a_wrong_grammar_fails_its_sequence() -> None:
    """Front ends refuse them; whoever speaks to the engine directly can send one."""
    found = Sequence("start: nowhere").sample("a")

    assert "nowhere" in found.failed[0]


def test_a_token_that_the_grammar_forbids_fails_its_sequence() -> None:
    found = Sequence(DIGITS, "1x").sample("1")

    assert found.failed[0]
    assert "<" not in found.failed[0]


def test_a_model_without_a_tokenizer_fails_guided_sequences() -> None:
    def nothing() -> LLTokenizer:
        raise GrammarFailed("there is no tokenizer.json")

    sampler = Sampler(1, VOCAB_SIZE, "cpu", guide=Guide(nothing, VOCAB_SIZE))
    sampling = SamplingParams(temperature=0.0, grammar=DIGITS)
    sampler.admit(Admission(slot=0, sampling=sampling, num_prompt=2, blocks=NO_INT32))
    log, slots, positions = log_of([PROMPT]), int32([0]), int32([2])

    sampler.prepare(slots, positions, log)
    found = sampler.sample(torch.zeros(1, VOCAB_SIZE), slots, positions, log)

    assert found.failed == {0: "there is no tokenizer.json"}


def test_rows_that_are_sampled_in_pieces_are_all_masked() -> None:
    """As on CPUs, where few rows of a large step have logits at a time."""
    guide = Guide(lambda: tokenizer(), VOCAB_SIZE)
    slots = list(range(6))
    for slot in slots:
        sampling = SamplingParams(temperature=0.0, grammar=DIGITS)
        guide.admit(
            Admission(slot=slot, sampling=sampling, num_prompt=2, blocks=NO_INT32, end_ids=(END,))
        )
    logits = torch.zeros(6, VOCAB_SIZE)

    guide.prepare(int32(slots), int32([2] * 6), log_of([PROMPT] * 6))
    for piece in (slice(0, 2), slice(2, 3), slice(3, 6)):
        guide.mask(logits[piece], slots[piece])

    assert torch.isfinite(logits[0]).sum() < VOCAB_SIZE
    assert (logits == logits[0]).all()
    guide.close()


def test_a_sequence_that_takes_too_long_fails_and_its_neighbours_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_over = threading.Event()

    def build(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
        while grammar == ENDLESS and not is_over.is_set():
            pass  # a thread that nobody can stop
        return new_matcher(tokenizer, grammar)

    monkeypatch.setattr(guide_module, "new_matcher", build)
    monkeypatch.setattr(guide_module, "STEP_LIMIT_S", 0.05)
    guide = Guide(lambda: tokenizer(), VOCAB_SIZE)
    slots, rows = [0, 1, 2], [[*PROMPT, *ids("1")], PROMPT, [*PROMPT, *ids("2")]]
    for slot, grammar in enumerate((DIGITS, ENDLESS, DIGITS)):
        sampling = SamplingParams(temperature=0.0, grammar=grammar)
        guide.admit(
            Admission(slot=slot, sampling=sampling, num_prompt=2, blocks=NO_INT32, end_ids=(END,))
        )
    logits = torch.zeros(3, VOCAB_SIZE)

    guide.prepare(int32(slots), int32([len(row) for row in rows]), log_of(rows))
    guide.mask(logits, slots)

    is_over.set()
    assert list(guide.failures(slots)) == [1]
    assert "over 0.05 s for one token" in guide.failures(slots)[1]
    allowed = {END, *ids("12"), *(token for digit in "0123456789" for token in ids(digit))}
    for row in (0, 2):
        assert set(torch.isfinite(logits[row]).nonzero()[:, 0].tolist()) == allowed
    guide.close()
