"""What `/v1/chat/completions` takes."""

from collections.abc import Mapping, Sequence
from typing import Annotated, TypeAlias

from pydantic import Field, SkipValidation, WithJsonSchema

from cluster.api.openai.generation_body import GenerationBody, Int
from cluster.api.openai.tools.schema import MAX_TOOLS, ChatTool, ChatToolChoice

_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "description": "system, developer, user, assistant or tool."},
        "content": {
            "anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]
        },
    },
    "required": ["role"],
}

MessagesField: TypeAlias = Annotated[
    Sequence[Mapping[str, object]],
    SkipValidation,
    WithJsonSchema({"type": "array", "items": _MESSAGE, "minItems": 1}),
]
"""Checked where they become a prompt; whatever else a message has is for the model's template."""


class ChatBody(GenerationBody):
    """A conversation to go on with."""

    messages: MessagesField = Field(description="The conversation so far; text only.")
    max_completion_tokens: Int = Field(None, description="The newer name of `max_tokens`.")
    logprobs: bool | None = Field(None, description="Log-probabilities of the answer's tokens.")
    top_logprobs: int | None = Field(
        None, description="With `logprobs`: that many likeliest tokens of each, 0 to 20."
    )

    tools: list[ChatTool] | None = Field(
        default=None,
        description="Functions that the model may call; at most 128.",
        max_length=MAX_TOOLS,
    )
    tool_choice: ChatToolChoice | None = Field(
        None, description="none, auto, required, or one function. auto if left out."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="Whether one answer may hold several calls. True."
    )

    add_generation_prompt: bool | None = Field(
        None, description="Begin the assistant's answer. True unless a message is continued."
    )
    continue_final_message: bool | None = Field(
        None, description="Go on inside the last message instead of beginning a new one."
    )
    chat_template_kwargs: dict[str, object] | None = Field(
        None, description="More variables for the model's chat template."
    )
