"""What `/v1/chat/completions` answers, field by field."""

from collections.abc import Sequence
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from cluster.api.openai.completion_shapes import PromptLogprob
from cluster.api.openai.token_logprobs import ShownToken, TokenEntry
from cluster.api.openai.tools.growth import CallGrowth
from cluster.api.openai.usage import Usage


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


class CalledFunction(Struct, frozen=True, kw_only=True):
    name: str
    arguments: str
    """JSON, if the model wrote JSON and was not cut."""


class ToolCall(Struct, frozen=True, kw_only=True):
    """A call that the model wants made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Struct, frozen=True, kw_only=True):
    """What the assistant says."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


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


class FunctionDelta(Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str
    """The next piece."""


class ToolCallDelta(Struct, frozen=True, kw_only=True):
    """What a call gained; id, type and name are in its first delta alone."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(Struct, frozen=True, kw_only=True):
    """What an answer gained."""

    role: Literal["assistant"] | UnsetType = UNSET
    """In the first chunk of each answer."""
    content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


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


class ChatChunk(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event of a stream: what one answer gained, or at the end the usage."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    """Only if asked for."""


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


def tool_call(growth: CallGrowth) -> ToolCall:
    """A call that is whole."""
    assert growth.call_id is not None
    assert growth.name is not None
    function = CalledFunction(name=growth.name, arguments=growth.arguments)
    return ToolCall(id=growth.call_id, function=function)


def tool_call_delta(growth: CallGrowth) -> ToolCallDelta:
    if growth.call_id is None or growth.name is None:
        return ToolCallDelta(index=growth.index, function=FunctionDelta(arguments=growth.arguments))
    return ToolCallDelta(
        index=growth.index,
        id=growth.call_id,
        type="function",
        function=FunctionDelta(name=growth.name, arguments=growth.arguments),
    )


def _top(token: ShownToken) -> TopLogprob:
    return TopLogprob(token=token.text, logprob=token.logprob, bytes=list(token.piece))
