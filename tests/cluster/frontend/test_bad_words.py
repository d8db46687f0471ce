import pytest

from cluster.frontend.bad_words import MAX_BAD_WORD_TOKENS
from cluster.frontend.tokenizer import Tokenizer
from scheduler.errors import InvalidRequest
from scheduler.sampling import MAX_BAD_WORDS, SamplingParams
from tests.cluster.frontend.tiny_tokenizers import make_tokenizer


def would_produce(
    tokenizer: Tokenizer, ids: list[int], banned: tuple[tuple[int, ...], ...]
) -> bool:
    return any(tuple(ids[i : i + len(word)]) == word for word in banned for i in range(len(ids)))


@pytest.mark.parametrize(
    "text", ["the dog", "one the dog", "one\nthe dog", "the", "over the", "(the)", "one,the dog"]
)
def test_the_word_is_banned_at_the_start_after_a_space_and_after_a_line(
    tokenizer: Tokenizer, text: str
) -> None:
    banned = tokenizer.bad_word_ids(["the"])
    ids = tokenizer.encode(text, add_special_tokens=False)

    assert would_produce(tokenizer, ids, banned)


def test_other_words_are_not_banned(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one fox jumps", add_special_tokens=False)

    assert not would_produce(tokenizer, ids, tokenizer.bad_word_ids(["the", " dog"]))


def test_a_byte_level_word_has_a_sequence_without_and_one_with_its_space() -> None:
    tokenizer = make_tokenizer("llama3_like")
    banned = tokenizer.bad_word_ids(["the"])

    assert {tokenizer.decode(ids) for ids in banned} == {"the", " the"}
    assert banned == tokenizer.bad_word_ids([" the", "the"])


@pytest.mark.model
def test_words_of_the_real_tokenizer_are_single_tokens_each_way(
    smollm2_tokenizer: Tokenizer,
) -> None:
    banned = smollm2_tokenizer.bad_word_ids(["Paris"])

    assert all(len(ids) == 1 for ids in banned)
    assert {smollm2_tokenizer.decode(ids) for ids in banned} == {"Paris", " Paris"}


def test_the_sequences_are_valid_sampling_parameters(tokenizer: Tokenizer) -> None:
    ids = tokenizer.bad_word_ids(["the", "lazy dog", "👩‍👩‍👧", " "])
    sampling = SamplingParams(bad_word_ids=ids)

    sampling.check_vocabulary(tokenizer.vocab_size)
    assert sampling.bad_word_ids == ids
    assert all(ids)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([""], "non-empty"),
        (["x"] * (MAX_BAD_WORDS + 1), f"{MAX_BAD_WORDS + 1} entries, at most {MAX_BAD_WORDS}"),
        (["a b " * MAX_BAD_WORD_TOKENS], f"tokens, at most {MAX_BAD_WORD_TOKENS}"),
    ],
)
def test_words_beyond_the_limits_are_refused_with_the_limit(words: list[str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        make_tokenizer("llama3_like").bad_word_ids(words)
    assert caught.value.param == "bad_words"
