import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from transformers import AutoTokenizer

from cluster.frontend.chat_template import NoChatTemplate
from cluster.frontend.tokenizer import Tokenizer
from cluster.frontend.tokenizer_files import TokenizerFiles
from scheduler.errors import InvalidRequest
from tests.cluster.frontend.texts import TEXTS
from tests.cluster.frontend.tiny_tokenizers import (
    FAMILIES,
    llama2_like,
    llama3_like,
    make_files,
    make_tokenizer,
)

CHATS: tuple[list[dict[str, object]], ...] = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Be brief. 你好"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two 👩‍👩‍👧"},
        {"role": "user", "content": " three \n"},
    ],
)


def write(files: TokenizerFiles, folder: Path) -> Path:
    (folder / "tokenizer.json").write_bytes(files.tokenizer_json)
    (folder / "tokenizer_config.json").write_bytes(files.config_json)
    (folder / "special_tokens_map.json").write_bytes(files.special_tokens_json)
    for source in files.chat_templates.values():
        (folder / "chat_template.jinja").write_text(source)
    return folder


class Pair:
    """Our tokenizer and transformers' one, from the same directory."""

    def __init__(self, folder: Path) -> None:
        self.ours = Tokenizer.from_directory(folder)
        self.theirs = AutoTokenizer.from_pretrained(folder)


@pytest.fixture(
    scope="module", params=[*FAMILIES, pytest.param("smollm2", marks=pytest.mark.model)]
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    if request.param == "smollm2":
        return Pair(request.getfixturevalue("smollm2"))
    return Pair(write(FAMILIES[request.param](), tmp_path_factory.mktemp(request.param)))


@pytest.mark.parametrize("text", [*TEXTS, "", " ", "<|im_end|> the </s> <｜a b｜>é", "the" * 1000])
@pytest.mark.parametrize("add", [True, False])
def test_encoding_is_what_transformers_gives(pair: Pair, text: str, add: bool) -> None:
    ids = pair.ours.encode(text, add_special_tokens=add)

    assert ids == pair.theirs.encode(text, add_special_tokens=add)


@settings(max_examples=60)
@given(text=st.text(max_size=40))
def test_encoding_and_decoding_any_text_is_what_transformers_gives(pair: Pair, text: str) -> None:
    ids = pair.ours.encode(text)

    assert ids == pair.theirs.encode(text)
    for skip in (True, False):
        assert pair.ours.decode(ids, skip_special_tokens=skip) == pair.theirs.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )


@settings(max_examples=60)
@given(data=st.data())
def test_decoding_any_ids_is_what_transformers_gives(pair: Pair, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, pair.ours.vocab_size - 1), max_size=20))
    for skip in (True, False):
        assert pair.ours.decode(ids, skip_special_tokens=skip) == pair.theirs.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("header", [True, False])
def test_chats_have_the_ids_that_transformers_gives(
    pair: Pair, messages: list[dict[str, object]], header: bool
) -> None:
    theirs = pair.theirs.apply_chat_template(
        messages, add_generation_prompt=header, return_dict=False
    )

    assert pair.ours.encode_chat(messages, add_generation_prompt=header) == theirs


def test_special_tokens_are_the_ones_that_transformers_names(pair: Pair) -> None:
    assert pair.ours.special_ids == set(pair.theirs.all_special_ids) | {
        i for i, token in pair.theirs.added_tokens_decoder.items() if token.special
    }
    assert pair.ours.eos_token_id == pair.theirs.eos_token_id
    assert pair.ours.bos_token_id == pair.theirs.bos_token_id
    assert pair.ours.vocab_size == len(pair.theirs)


@pytest.mark.parametrize(
    "config",
    [
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_eos_token": True},
        {"eos_token": "<think>"},
        {"extra_special_tokens": {"image_token": "<|extra|>"}},
        {"additional_special_tokens": ["<|extra|>", "<think>"]},
        {"added_tokens_decoder": {"386": {"content": "<|late|>", "special": True}}},
        {"added_tokens_decoder": {"386": {"content": "<x>", "special": False}}},
        {"pad_token": {"content": "<|pad|>", "__type": "AddedToken"}},
    ],
)
def test_the_config_changes_the_tokenizer_as_in_transformers(
    tmp_path: Path, config: dict[str, object]
) -> None:
    base = {"bos_token": "<|begin|>", "eos_token": "<|im_end|>"}
    raw = RawTokenizer.from_buffer(llama3_like().tokenizer_json)
    pair = Pair(write(make_files(raw, **base | config), tmp_path))
    for text in ("the dog", "a <|extra|> <think> <|late|> <x> <|pad|> b"):
        ids = pair.ours.encode(text)

        assert ids == pair.theirs.encode(text)
        assert pair.ours.decode(ids) == pair.theirs.decode(ids, skip_special_tokens=True)


def test_truncation_and_padding_saved_with_a_tokenizer_are_switched_off() -> None:
    raw = RawTokenizer.from_buffer(llama3_like().tokenizer_json)
    raw.enable_truncation(2)
    raw.enable_padding(length=50)
    tokenizer = Tokenizer.from_files(make_files(raw))

    assert tokenizer.encode("one two three") == make_tokenizer("llama3_like").encode(
        "one two three"
    )


def test_a_chat_has_no_second_begin_token() -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer.from_files(
        TokenizerFiles(
            tokenizer_json=llama3_like().tokenizer_json,
            config_json=llama3_like().config_json,
            chat_templates={"default": template},
        )
    )
    ids = tokenizer.encode_chat([{"role": "user", "content": "the dog"}])

    assert ids == tokenizer.encode("the dog")
    assert ids.count(tokenizer.bos_token_id or 0) == 1


@pytest.mark.model
def test_the_question_of_the_readme_is_37_tokens(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode_chat(CHATS[0])

    assert len(ids) == 37
    assert ids[0] == smollm2_tokenizer.bos_token_id == 1
    assert smollm2_tokenizer.eos_token_id == 2


def test_content_as_parts_gives_the_same_ids(tokenizer: Tokenizer) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]

    assert tokenizer.encode_chat(parts) == tokenizer.encode_chat(
        [{"role": "user", "content": "hi"}]
    )


def test_the_answer_header_is_left_out_when_the_last_message_is_continued() -> None:
    tokenizer = make_tokenizer("llama3_like")
    messages = [*CHATS[0], {"role": "assistant", "content": "Paris is"}]

    ids = tokenizer.encode_chat(messages, continue_final_message=True)

    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("assistant\nParis is")


def test_a_model_without_a_template_is_an_error_that_says_what_to_do() -> None:
    raw = RawTokenizer.from_buffer(llama3_like().tokenizer_json)
    tokenizer = Tokenizer.from_files(make_files(raw, template=None))

    assert not tokenizer.has_chat_template
    with pytest.raises(NoChatTemplate, match=r"no chat template\. .*chat_template\.jinja"):
        tokenizer.encode_chat(CHATS[0])


def test_the_template_for_tools_is_used_when_tools_are_given() -> None:
    tokenizer = Tokenizer.from_files(
        TokenizerFiles(
            tokenizer_json=llama3_like().tokenizer_json,
            chat_templates={"default": "plain", "tool_use": "{{ tools[0].name }}"},
        )
    )
    assert tokenizer.render_chat(CHATS[0]) == "plain"
    assert tokenizer.render_chat(CHATS[0], tools=[{"name": "weather"}]) == "weather"


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_the_tokens_joined_are_the_text(text: str) -> None:
    for family, start in (("llama3_like", ""), ("llama2_like", " ")):
        tokenizer = make_tokenizer(family)
        ids = tokenizer.encode(text, add_special_tokens=False)

        assert b"".join(map(tokenizer.token_bytes, ids)) == (start + text).encode()


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_real_tokens_joined_are_the_text(
    smollm2_tokenizer: Tokenizer, text: str
) -> None:
    ids = smollm2_tokenizer.encode(text)

    assert b"".join(map(smollm2_tokenizer.token_bytes, ids)) == text.encode()


def test_every_token_has_a_text_and_bytes_that_agree(tokenizer: Tokenizer) -> None:
    for token_id in range(min(tokenizer.vocab_size, 3000)):
        data = tokenizer.token_bytes(token_id)
        assert data or tokenizer.decode([token_id]) == ""
        assert tokenizer.token_text(token_id) == data.decode(errors="replace")
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.token_text(2**40) == tokenizer.token_text(-1) == ""


def test_a_token_keeps_the_space_that_it_begins_with() -> None:
    for family in ("llama3_like", "llama2_like"):
        tokenizer = make_tokenizer(family)
        dog = tokenizer.encode("the dog", add_special_tokens=False)[-1]
        assert tokenizer.token_text(dog) == " dog"
        assert tokenizer.token_bytes(dog) == b" dog"


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", 5, None, b"x", ["x"]])
def test_what_is_not_a_valid_text_is_refused(text: str) -> None:
    tokenizer = make_tokenizer("llama3_like")
    for call in (
        lambda: tokenizer.encode(text),
        lambda: tokenizer.encode(text, parse_control_tokens=False),
        lambda: tokenizer.encode_chat([{"role": "user", "content": text, "name": text}]),
    ):
        with pytest.raises(InvalidRequest):
            call()


def test_template_options_cannot_replace_the_messages() -> None:
    with pytest.raises(InvalidRequest, match="may not set messages"):
        make_tokenizer("llama3_like").encode_chat(CHATS[0], template_options={"messages": []})


def test_fifty_threads_use_one_tokenizer_at_once() -> None:
    tokenizer = Tokenizer.from_files(llama2_like())  # a fresh one: caches are filled in the race
    forged = [{"role": "user", "content": "the <|im_end|> dog"}]

    def work(number: int) -> tuple[object, ...]:
        text = f"the quick fox {number % 5} 👩‍👩‍👧"
        detokenizer = tokenizer.detokenizer()
        ids = tokenizer.encode(text)
        return (
            ids,
            detokenizer.feed(ids) + detokenizer.flush(),
            tokenizer.encode_chat([{"role": "user", "content": text}]),
            tokenizer.encode_chat(forged),
            tokenizer.bad_word_ids([text]),
            tokenizer.token_bytes(number),
            tokenizer.decode(ids[number % 7 :]),
        )

    outcomes: list[tuple[object, ...] | None] = [None] * 50
    start = threading.Barrier(50)

    def run(number: int) -> None:
        start.wait()
        for _ in range(10):
            outcomes[number] = work(number)

    run_all(run, 50)
    assert outcomes == [work(number) for number in range(50)]


def run_all(run: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_tokenizer_needs_neither_torch_nor_ray_nor_transformers() -> None:
    names = ("torch", "transformers", "ray", "zmq")
    code = (
        f"import sys, cluster.frontend.tokenizer; print([n for n in {names} if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
