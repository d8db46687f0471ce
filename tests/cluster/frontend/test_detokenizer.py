from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer

from cluster.frontend.detokenizer import Detokenizer
from cluster.frontend.token_pieces import TokenPieces
from cluster.frontend.tokenizer import Tokenizer
from tests.cluster.frontend.texts import TEXTS
from tests.cluster.frontend.tiny_tokenizers import make_tokenizer


def deltas_of(tokenizer: Tokenizer, pieces: list[list[int]], *, skip: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    return [*map(detokenizer.feed, pieces), detokenizer.flush()]


def one_by_one(ids: list[int]) -> list[list[int]]:
    return [[token_id] for token_id in ids]


@st.composite
def broken_texts(draw: st.DrawFn) -> bytes:
    """UTF-8 with one byte lost."""
    data = draw(st.text(min_size=1)).encode()
    lost = draw(st.integers(0, len(data) - 1))
    return data[:lost] + data[lost + 1 :]


@pytest.mark.parametrize("text", TEXTS)
def test_joined_deltas_equal_the_one_shot_text_at_every_token_border(
    tokenizer: Tokenizer, text: str
) -> None:
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)

    assert "".join(deltas_of(tokenizer, one_by_one(ids))) == whole
    for border in range(len(ids) + 1):
        assert "".join(deltas_of(tokenizer, [ids[:border], ids[border:]])) == whole


@pytest.mark.parametrize("text", [text for text in TEXTS if "\ufffd" not in text])
@pytest.mark.parametrize("family", ["llama3_like", "llama2_like", "unknown_decoder"])
def test_a_delta_never_holds_half_a_character(family: str, text: str) -> None:
    tokenizer = make_tokenizer(family)
    deltas = deltas_of(tokenizer, one_by_one(tokenizer.encode(text)))

    assert not any("\ufffd" in delta for delta in deltas)
    assert "".join(deltas) == text


def test_an_added_token_of_any_letters_is_its_own_text() -> None:
    for family in ("llama3_like", "unknown_decoder"):
        tokenizer = make_tokenizer(family)
        ids = tokenizer.encode("the <｜a b｜>é dog", add_special_tokens=False)
        assert tokenizer.token_id("<｜a b｜>é") in ids

        assert "".join(deltas_of(tokenizer, one_by_one(ids))) == "the <｜a b｜>é dog"


def test_a_character_comes_with_its_last_byte_and_not_later() -> None:
    tokenizer = make_tokenizer("llama3_like")
    ids = tokenizer.encode("é", add_special_tokens=False)
    assert len(ids) == 2

    assert deltas_of(tokenizer, one_by_one(ids)) == ["", "é", ""]


def test_a_run_of_byte_tokens_comes_with_the_token_after_it() -> None:
    tokenizer = make_tokenizer("llama2_like")
    names = ["▁dog", "<0xE4>", "<0xBD>", "<0xA0>", "▁the"]
    ids = [token_id for name in names if (token_id := tokenizer.token_id(name)) is not None]

    assert deltas_of(tokenizer, one_by_one(ids)) == ["dog", "", "", "", "你 the", ""]


def test_a_lone_lead_byte_is_replaced_once_it_can_never_become_a_character() -> None:
    tokenizer = make_tokenizer("llama3_like")
    lead = tokenizer.encode("😀", add_special_tokens=False)[0]
    (letter,) = tokenizer.encode("x", add_special_tokens=False)
    assert tokenizer.token_bytes(lead) == b"\xf0"

    assert deltas_of(tokenizer, one_by_one([lead, letter, lead])) == ["", "\ufffdx", "", "\ufffd"]


def test_a_broken_run_of_byte_tokens_becomes_one_replacement_per_byte() -> None:
    tokenizer = make_tokenizer("llama2_like")
    names = ["<0xE4>", "<0xBD>", "<0xA0>", "<0xFF>"]
    ids = [token_id for name in names if (token_id := tokenizer.token_id(name)) is not None]

    assert "".join(deltas_of(tokenizer, one_by_one(ids))) == "\ufffd" * 4 == tokenizer.decode(ids)


def test_special_tokens_add_no_text_unless_asked(tokenizer: Tokenizer) -> None:
    end = tokenizer.eos_token_id
    assert end is not None
    ids = [*tokenizer.encode("the dog", add_special_tokens=False), end]
    pieces = one_by_one(ids)

    assert "".join(deltas_of(tokenizer, pieces)) == "the dog"
    shown = "".join(deltas_of(tokenizer, pieces, skip=False))
    assert shown == tokenizer.decode(ids, skip_special_tokens=False)
    assert shown.count(tokenizer.special_tokens["eos_token"]) == 1


def test_ids_outside_the_vocabulary_add_nothing(tokenizer: Tokenizer) -> None:
    inside = tokenizer.encode("the dog", add_special_tokens=False)
    ids = [2**31 - 1, *inside, -1, tokenizer.vocab_size + 5, 2**40]

    assert "".join(deltas_of(tokenizer, one_by_one(ids))) == "the dog" == tokenizer.decode(ids)


@settings(max_examples=150)
@given(data=st.data(), skip=st.booleans())
def test_any_ids_in_any_pieces_give_the_one_shot_text(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    # Single bytes and special tokens have low ids, so both ranges matter.
    low, any_id = st.integers(0, 270), st.integers(0, tokenizer.vocab_size + 3)
    ids = data.draw(st.lists(st.one_of(low, any_id), max_size=40))
    borders = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    pieces = [ids[a:b] for a, b in pairwise([0, *borders, len(ids)])]

    deltas = deltas_of(tokenizer, pieces, skip=skip)

    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100)
@given(data=st.one_of(st.binary(max_size=60), st.text().map(str.encode), broken_texts()))
@pytest.mark.parametrize("family", ["llama3_like", "llama2_like"])
def test_any_bytes_give_the_one_shot_text(family: str, data: bytes) -> None:
    tokenizer = make_tokenizer(family)
    id_of_byte = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    ids = [id_of_byte[bytes([byte])] for byte in data]

    assert "".join(deltas_of(tokenizer, one_by_one(ids))) == tokenizer.decode(ids)


def test_nothing_may_be_fed_after_the_end(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    detokenizer.flush()
    with pytest.raises(AssertionError):
        detokenizer.feed([1])


def test_the_cost_of_a_token_does_not_grow_with_the_output() -> None:
    tokenizer = make_tokenizer("unigram")
    sizes: list[int] = []

    def decode(ids: object) -> str:
        assert isinstance(ids, list)
        sizes.append(len(ids))
        return tokenizer.decode(ids)

    raw = RawTokenizer.from_buffer(tokenizer.files.tokenizer_json)
    detokenizer = Detokenizer(TokenPieces(raw), decode, skip_special_tokens=True)
    ids = tokenizer.encode("the dog jumps over the lazy dog " * 20, add_special_tokens=False)

    joined = "".join([detokenizer.feed([token_id]) for token_id in ids]) + detokenizer.flush()

    assert joined == tokenizer.decode(ids)
    assert len(ids) > 200
    assert max(sizes) <= 4
