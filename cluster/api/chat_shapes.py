"""What `/v1/chat/completions` answers, field by field."""

from collections.abc import Sequence
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from cluster.api.completion_shapes import PromptLogprob
from cluster.api.token_logprobs import ShownToken, TokenEntry
from cluster.api.usage import Usage


class TopLogprob(Struct, frozen=True, kw_only=True):
    """A token that was possible at a position."""

    token: str
    """A part of a character shows as U+FFFD; `bytes` are exact."""
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct, frozen=True, kw_only=True):
    """The token at a position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(Struct, frozen=True, kw_only=True):
    """What the assistant says."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None


FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class ChatChoice(Struct, frozen=True, kw_only=True):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    """The stop text or stop token id; None for the model's own end token."""
    token_ids: list[int] | UnsetType = UNSET
    """Only with `return_token_ids`."""


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """The whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    """By token id; only if asked for."""
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Only with `return_token_ids`."""


class ChatDelta(Struct, frozen=True, kw_only=True):
    """What an answer gained."""

    role: Literal["assistant"] | UnsetType = UNSET
    """In the first chunk of each answer."""
    content: str | UnsetType | None = UNSET


class ChatChunkChoice(Struct, frozen=True, kw_only=True):
    """The news of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    """In the last chunk of each answer."""
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    """In the first chunk of each answer."""


def chat_logprobs(entries: Sequence[TokenEntry]) -> ChatLogprobs:
    return ChatLogprobs(
        content=[
            TokenLogprob(
                token=entry.token.text,
                logprob=entry.token.logprob,
                bytes=list(entry.token.piece),
                top_logprobs=[_top(token) for token in entry.likeliest],
            )
            for entry in entries
        ]
    )


def _top(token: ShownToken) -> TopLogprob:
    return TopLogprob(token=token.text, logprob=token.logprob, bytes=list(token.piece))
