"""What `/v1/responses` answers, field by field."""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from msgspec import Struct

Status: TypeAlias = Literal["in_progress", "completed", "incomplete", "failed"]
Fields: TypeAlias = Mapping[str, Any]
"""A part of the body, said again."""
ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class ResponseTopLogprob(Struct, frozen=True, kw_only=True):
    """A token that was possible at a position."""

    token: str
    """A part of a character shows as U+FFFD; `bytes` are exact."""
    bytes: list[int]
    logprob: float


class ResponseLogprob(ResponseTopLogprob, frozen=True, kw_only=True):
    """The token at a position."""

    top_logprobs: list[ResponseTopLogprob]


class OutputText(Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str
    annotations: list[None] = []
    """None are ever made."""
    logprobs: list[ResponseLogprob]
    """Empty unless `include` asked for them."""


class MessageItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """Text for the user."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class CallItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call that the model wants made."""

    id: str
    status: ItemStatus
    call_id: str
    """Its result comes back under this name."""
    name: str
    arguments: str
    """JSON, if the model wrote JSON and was not cut."""


Item: TypeAlias = MessageItem | CallItem


class IncompleteDetails(Struct, frozen=True):
    reason: Literal["max_output_tokens"]


class ResponseFailure(Struct, frozen=True, kw_only=True):
    code: Literal["server_error"]
    message: str


class InputTokensDetails(Struct, frozen=True, kw_only=True):
    cached_tokens: int
    """Whose keys and values were in the prefix cache."""
    cache_write_tokens: Literal[0] = 0


class OutputTokensDetails(Struct, frozen=True, kw_only=True):
    reasoning_tokens: Literal[0] = 0


class ResponseUsage(Struct, frozen=True, kw_only=True):
    """How many tokens the call took."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int


class ResponseObject(Struct, frozen=True, kw_only=True):
    """The answer, with what was asked."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    output: list[Item]
    usage: ResponseUsage | None = None
    """Once the answer is over."""
    model: str
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    text: dict[str, Fields]
    tools: list[Fields]
    tool_choice: str | Fields
    parallel_tool_calls: bool
    metadata: Fields
    user: str | None
    background: Literal[False] = False
    max_tool_calls: None = None
    previous_response_id: None = None
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"


class ResponseEvent(Struct, frozen=True, kw_only=True):
    """One event of a stream. Each type has fields of its own, as OpenAI defines them."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    """Counts the events of the stream from 0."""
