from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.frontend.text_stream import TextDelta
from cluster.frontend.tokenizer import Tokenizer
from scheduler.sampling import SamplingParams
from tests.cluster.frontend.texts import TEXTS
from tests.cluster.frontend.tiny_tokenizers import make_tokenizer

SENTENCE = "one two three: 你好 👩‍👩‍👧 ten"


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def run(tokenizer: Tokenizer, ids: list[int], sampling: SamplingParams) -> tuple[str, int]:
    """Text and number of tokens kept, fed one by one."""
    stream = tokenizer.text_stream(sampling)
    deltas = [stream.feed([token_id]) for token_id in ids] + [stream.flush()]
    return "".join(delta.text for delta in deltas), stream.num_tokens


def num_tokens_until(tokenizer: Tokenizer, ids: list[int], text: str) -> int:
    """How many tokens it takes until decoding gives all of `text`."""
    return next(n for n in range(len(ids) + 1) if tokenizer.decode(ids[:n]).startswith(text))


def test_every_substring_as_a_stop_string_cuts_the_text_where_it_first_ends(
    tokenizer: Tokenizer,
) -> None:
    ids = ids_of(tokenizer, SENTENCE)
    whole = tokenizer.decode(ids)
    for start in range(len(whole)):
        for end in range(start + 1, min(start + 12, len(whole)) + 1):
            stop = whole[start:end]
            at = whole.find(stop)

            text, num_tokens = run(tokenizer, ids, SamplingParams(stop=stop))

            assert text == whole[:at]
            assert num_tokens <= len(ids)
            assert tokenizer.decode(ids[:num_tokens]).find(stop) == at


@pytest.mark.model
def test_a_stop_string_of_seven_characters_stops_at_every_place_of_a_real_text(
    smollm2_tokenizer: Tokenizer,
) -> None:
    text = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12. Then the counting ends — finally! 🎉"
    ids = ids_of(smollm2_tokenizer, text)
    for start in range(len(text) - 7):
        stop = text[start : start + 7]

        out, num_tokens = run(smollm2_tokenizer, ids, SamplingParams(stop=[stop]))

        assert out == text[: text.find(stop)]
        assert num_tokens == num_tokens_until(smollm2_tokenizer, ids, text[: text.find(stop) + 7])


@pytest.mark.parametrize("text", TEXTS)
def test_stop_strings_that_never_come_change_nothing(tokenizer: Tokenizer, text: str) -> None:
    ids = ids_of(tokenizer, text)
    sampling = SamplingParams(stop=["\n\n\n\n", "THE END", "👩‍🚒"])

    assert run(tokenizer, ids, sampling) == (tokenizer.decode(ids), len(ids))


def test_tokens_after_the_one_that_completes_the_stop_string_are_dropped() -> None:
    tokenizer = make_tokenizer("llama3_like")
    ids = ids_of(tokenizer, "one two three four")
    stream = tokenizer.text_stream(SamplingParams(stop="tw"))

    delta = stream.feed(ids)

    kept = num_tokens_until(tokenizer, ids, "one tw")
    assert delta == TextDelta(text="one ", num_tokens=kept, stopped_by="tw")
    assert kept < len(ids)
    assert stream.feed(ids) == TextDelta(text="", num_tokens=0, stopped_by="tw")
    assert stream.flush() == TextDelta(text="", num_tokens=0, stopped_by="tw")
    assert (stream.num_tokens, stream.num_chars, stream.stopped_by) == (kept, 4, "tw")


def test_the_stop_string_is_kept_when_asked_but_not_what_its_token_holds_after_it() -> None:
    tokenizer = make_tokenizer("llama3_like")
    ids = ids_of(tokenizer, "one two three four")
    sampling = SamplingParams(stop="tw", include_stop_str_in_output=True)

    assert run(tokenizer, ids, sampling)[0] == "one tw"


def test_a_stop_string_within_min_tokens_does_not_stop_and_the_next_one_does() -> None:
    tokenizer = make_tokenizer("llama3_like")
    ids = ids_of(tokenizer, "dog, dog, dog")
    needed = num_tokens_until(tokenizer, ids, "dog, d")

    first = run(tokenizer, ids, SamplingParams(stop="dog", min_tokens=1))[0]
    second = run(tokenizer, ids, SamplingParams(stop="dog", min_tokens=needed))[0]

    assert (first, second) == ("", "dog, ")


def test_a_stop_string_may_be_completed_by_the_end_of_the_output() -> None:
    tokenizer = make_tokenizer("llama3_like")
    lead = ids_of(tokenizer, "😀")[0]
    stream = tokenizer.text_stream(SamplingParams(stop="\ufffd"))

    assert stream.feed([*ids_of(tokenizer, "dog"), lead]).text == "dog"
    assert stream.flush() == TextDelta(text="", num_tokens=0, stopped_by="\ufffd")


def test_special_tokens_can_be_stop_strings_when_they_are_shown() -> None:
    tokenizer = make_tokenizer("llama3_like")
    end = tokenizer.eos_token_id
    assert end is not None
    ids = [*ids_of(tokenizer, "dog"), end]

    shown = SamplingParams(stop="<|im_end|>", skip_special_tokens=False)
    assert run(tokenizer, ids, shown) == ("dog", len(ids))
    hidden = tokenizer.text_stream(SamplingParams(stop="<|im_end|>"))
    hidden.feed(ids)
    assert hidden.flush().stopped_by is None


@settings(max_examples=100)
@given(
    borders=st.lists(st.integers(0, 40), max_size=5),
    stops=st.lists(st.sampled_from(["two", "e t", "好 ", "👩", "ten", "xyz"]), max_size=3),
    min_tokens=st.integers(0, 12),
    include=st.booleans(),
)
def test_the_outcome_does_not_depend_on_how_many_ids_come_at_once(
    tokenizer: Tokenizer, borders: list[int], stops: list[str], min_tokens: int, include: bool
) -> None:
    ids = ids_of(tokenizer, SENTENCE)
    sampling = SamplingParams(
        stop=stops, min_tokens=min_tokens, max_tokens=99, include_stop_str_in_output=include
    )
    cuts = sorted({0, len(ids), *(border for border in borders if border < len(ids))})
    stream = tokenizer.text_stream(sampling)

    deltas = [stream.feed(ids[a:b]) for a, b in pairwise(cuts)] + [stream.flush()]

    assert ("".join(delta.text for delta in deltas), stream.num_tokens) == run(
        tokenizer, ids, sampling
    )
    assert sum(delta.num_tokens for delta in deltas) == stream.num_tokens
    assert sum(len(delta.text) for delta in deltas) == stream.num_chars
