"""Answers as they grow, token by token: what a reader sees never has to be taken back."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from cluster.api.calls import Call
from cluster.api.openai.chat_answer import ChatAnswer
from cluster.api.openai.chat_body import ChatBody
from cluster.api.openai.completion_answer import CompletionAnswer
from cluster.api.openai.completion_body import CompletionBody
from cluster.frontend.tokenizer import Tokenizer
from scheduler.request import Finish
from scheduler.sampling import SamplingParams
from tests.cluster.api.local_engine import LocalEngine
from tests.cluster.frontend.texts import TEXTS
from tests.cluster.frontend.tiny_tokenizers import make_tokenizer

JOINER, TEXT_STYLE = "\u200d", "\ufe0f"
TONES = [chr(0x1F3FB + i) for i in range(5)]
PEOPLE = ["👨", "👩", "👧", "👦", "🧑"]
EMOJI = (
    *(JOINER.join((a, b, c)) for a in PEOPLE[:2] for b in PEOPLE[1:3] for c in PEOPLE[2:]),
    *(JOINER.join((PEOPLE[0] + tone, "🤝", PEOPLE[1] + tone)) for tone in TONES),
    *(f"🤷{tone}{JOINER}♀{TEXT_STYLE}" for tone in TONES),
    *(chr(0x1F1E6 + i) + chr(0x1F1E6 + (i * 7 + 3) % 26) for i in range(26)),
    *(f"{sign}{TEXT_STYLE}\u20e3" for sign in "0123456789#*"),
    "🏴󠁧󠁢󠁥󠁮󠁧󠁿🏴󠁧󠁢󠁷󠁬󠁳󠁿🏳️‍🌈🏳️‍⚧️❤️‍🩹👁️‍🗨️",
)
"""Families with and without skin tones, flags of letters and of tags, keycaps."""

ALL_TEXTS = (*TEXTS, "".join(EMOJI))


class Seen(NamedTuple):
    """What a reader has put together from chunks."""

    texts: list[str]
    piece: bytes
    """Of all log-probability entries."""
    finish_reason: str | None
    stop_reason: object

    @property
    def text(self) -> str:
        return "".join(self.texts)


def chat_answer(call: Call, logprobs: bool) -> ChatAnswer:
    body = ChatBody(messages=[], logprobs=logprobs or None)
    return ChatAnswer(call, body, created=0, model="tiny")


def completion_answer(call: Call, logprobs: bool) -> CompletionAnswer:
    body = CompletionBody(prompt="", logprobs=0 if logprobs else None)
    return CompletionAnswer(call, body, created=0, model="tiny")


Answer = ChatAnswer | CompletionAnswer
MAKERS: dict[str, Callable[[Call, bool], Answer]] = {
    "chat": chat_answer,
    "completions": completion_answer,
}


def read(answer: Answer) -> Iterator[dict[str, object]]:
    """The choices of all that the answer gained."""
    for event in answer.growth().split(b"\n\n")[:-1]:
        (choice,) = json.loads(event.removeprefix(b"data: "))["choices"]
        yield choice


def watched(
    make: Callable[[Call, bool], Answer],
    tokenizer: Tokenizer,
    ids: list[int],
    *,
    logprobs: bool = False,
    **sampling: object,
) -> Seen:
    """Read an answer after each of its tokens."""
    engine = LocalEngine(tokenizer)
    wanted = {"max_tokens": 4000, "logprobs": 0 if logprobs else None, **sampling}
    call = engine.call(SamplingParams(**wanted))  # type: ignore[arg-type]
    answer = make(call, logprobs)
    texts: list[str] = []
    piece = b""
    ends: list[tuple[str, object]] = []
    for i, token_id in enumerate(ids):
        finish = Finish.LENGTH if i == len(ids) - 1 else Finish.NOT_YET
        engine.speak(engine.sent[0], [token_id], i, finish)
        for choice in read(answer):
            delta = choice.get("delta")
            texts.append(
                str(delta.get("content", "") if isinstance(delta, dict) else choice["text"])
            )
            piece += pieces(choice["logprobs"])
            if choice["finish_reason"]:
                ends.append((str(choice["finish_reason"]), choice["stop_reason"]))
        if call.is_done:
            break
    assert len(ends) == 1, ends
    return Seen(texts, piece, *ends[0])


def pieces(logprobs: object) -> bytes:
    if not isinstance(logprobs, dict):
        return b""
    if "content" in logprobs:
        return b"".join(bytes(entry["bytes"]) for entry in logprobs["content"])
    return b"".join(
        bytes.fromhex(name.removeprefix("bytes:").replace("\\x", ""))
        if name.startswith("bytes:")
        else name.encode()
        for name in logprobs["tokens"]
    )


def check_texts(
    make: Callable[[Call, bool], Answer], tokenizer: Tokenizer, texts: Sequence[str]
) -> None:
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        whole = tokenizer.decode(ids)
        seen = watched(make, tokenizer, ids, logprobs=True)
        assert seen.text == whole
        assert seen.finish_reason == "length"
        if "\ufffd" not in whole:
            assert not any("\ufffd" in one for one in seen.texts)
        assert seen.piece.decode(errors="replace") == whole
        if make is chat_answer:
            assert watched(make, tokenizer, ids).texts == seen.texts


def check_stops(make: Callable[[Call, bool], Answer], tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    text = tokenizer.decode(ids)
    for first in range(len(text)):
        for last in range(first + 1, len(text) + 1):
            stop = text[first:last]
            cut = text.index(stop)
            for keeps in (False, True):
                seen = watched(make, tokenizer, ids, stop=[stop], include_stop_str_in_output=keeps)
                assert seen.text == text[: cut + len(stop) if keeps else cut]
                assert (seen.finish_reason, seen.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("route", MAKERS)
@pytest.mark.parametrize("family", ["llama3_like", "llama2_like", "unknown_decoder"])
def test_every_script_and_emoji_survives_every_token_border(route: str, family: str) -> None:
    check_texts(MAKERS[route], make_tokenizer(family), (*TEXTS, "".join(EMOJI[::5])))


@pytest.mark.model
def test_every_script_and_emoji_survives_every_token_border_of_the_model(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_directory(smollm2)
    check_texts(chat_answer, tokenizer, ALL_TEXTS)
    check_texts(completion_answer, tokenizer, TEXTS)


@pytest.mark.parametrize("route", MAKERS)
def test_every_part_of_an_output_is_a_stop_text_at_every_border(route: str) -> None:
    check_stops(MAKERS[route], make_tokenizer("llama3_like"), "to be, 👨‍👩 é be")


@pytest.mark.slow
@pytest.mark.model
def test_every_part_of_a_longer_output_is_a_stop_text_for_the_model(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_directory(smollm2)
    for make in MAKERS.values():
        check_stops(make, tokenizer, "Hi 👩‍👩‍👧‍👦, 世界! e\u0301 🇫🇷 end end")


def test_a_stopped_answer_has_entries_for_its_text_and_at_most_one_token_beyond() -> None:
    tokenizer = make_tokenizer("llama3_like")
    text = " the quick brown fox"
    ids = tokenizer.encode(text, add_special_tokens=False)
    for first in range(len(text)):
        for last in range(first + 1, len(text) + 1):
            stop = text[first:last]
            for make in MAKERS.values():
                seen = watched(make, tokenizer, ids, logprobs=True, stop=[stop])
                assert seen.piece.decode().startswith(seen.text)
                beyond = len(seen.piece) - len(seen.text)
                assert beyond < max(len(tokenizer.token_bytes(token_id)) for token_id in ids)


def test_text_that_may_begin_a_stop_text_is_held_back() -> None:
    tokenizer = make_tokenizer("llama3_like")
    ids = tokenizer.encode("one two three", add_special_tokens=False)
    seen = watched(chat_answer, tokenizer, ids, stop=["two four", "three!"])
    assert seen.text == "one two three"
    for end in range(len(seen.texts)):
        assert not "".join(seen.texts[:end]).endswith(("two", "two ", "three"))
