"""Answers of the official client, whole or put together from chunks."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk


@dataclass(slots=True)
class Told:
    """What one choice says, in a form that whole answers and streams share."""

    text: str = ""
    finish_reason: str | None = None
    stop_reason: object = None
    logprobs: list[object] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] | None = None


def of_completions(parts: Iterable[Completion]) -> dict[int, Told]:
    """By index, of one whole answer or of chunks."""
    told: dict[int, Told] = {}
    for part in parts:
        for choice in part.choices:
            one = told.setdefault(choice.index, Told())
            one.text += choice.text
            _take(one, choice)
            columns = choice.logprobs
            if columns is not None:
                one.logprobs += zip(
                    columns.tokens or [],
                    columns.token_logprobs or [],
                    columns.top_logprobs or [],
                    columns.text_offset or [],
                    strict=True,
                )
    return told


def of_chat(answer: ChatCompletion) -> dict[int, Told]:
    told: dict[int, Told] = {}
    for choice in answer.choices:
        one = told[choice.index] = Told(text=choice.message.content or "")
        _take(one, choice)
        _take_entries(one, choice.logprobs)
        one.prompt_token_ids = getattr(answer, "prompt_token_ids", None)
    return told


def of_chat_chunks(chunks: Iterable[ChatCompletionChunk]) -> dict[int, Told]:
    told: dict[int, Told] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            one = told.setdefault(choice.index, Told())
            one.text += choice.delta.content or ""
            _take(one, choice)
            _take_entries(one, choice.logprobs)
    return told


def _take(one: Told, choice: object) -> None:
    one.finish_reason = getattr(choice, "finish_reason", None) or one.finish_reason
    one.stop_reason = getattr(choice, "stop_reason", None) or one.stop_reason
    one.token_ids += getattr(choice, "token_ids", None) or []
    given = getattr(choice, "prompt_token_ids", None)
    one.prompt_token_ids = one.prompt_token_ids if given is None else given


def _take_entries(one: Told, logprobs: object) -> None:
    content = getattr(logprobs, "content", None)
    one.logprobs += content or []
