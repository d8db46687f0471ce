"""What `/v1/responses` takes."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, SkipValidation, WithJsonSchema

from cluster.api.openai.generation_body import Anything, GenerationBody, Int
from cluster.api.openai.tools.schema import (
    MAX_TOOLS,
    FunctionDefinition,
    FunctionName,
    FunctionReference,
    ToolsModel,
)

_ITEM = {
    "type": "object",
    "description": "A message, a function_call, or a function_call_output.",
    "properties": {
        "type": {"enum": ["message", "function_call", "function_call_output", "reasoning"]},
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
    },
}

InputField: TypeAlias = Annotated[
    str | Sequence[Mapping[str, object]],
    SkipValidation,
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _ITEM}]}),
]
"""Checked where it becomes messages."""


class TextFormat(ToolsModel):
    """The form of the answer's text."""

    type: Literal["text"] = "text"


class JsonObjectFormat(ToolsModel):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(ToolsModel):
    """JSON that is valid by a schema."""

    type: Literal["json_schema"]
    name: FunctionName
    schema_: dict[str, object] = Field(alias="schema", description="The JSON schema.")
    description: str | None = None
    strict: bool | None = Field(None, description="Accepted; the schema always holds.")


class TextOptions(ToolsModel):
    """What the answer's text is to be."""

    format: (
        Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
        | None
    ) = None
    verbosity: Anything = Field(None, description="Accepted; means nothing here.")


class ResponsesTool(FunctionDefinition):
    """A function, all in one object; functions are the only tools there are."""

    type: Literal["function"]


class ResponsesNamedTool(FunctionReference):
    """The model must call this function."""

    type: Literal["function"]


class ResponsesAllowedTools(ToolsModel):
    """The model may, or must, call some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ResponsesNamedTool] = Field(min_length=1, max_length=MAX_TOOLS)


ResponsesToolChoice: TypeAlias = (
    Literal["none", "auto", "required"]
    | Annotated[ResponsesNamedTool | ResponsesAllowedTools, Field(discriminator="type")]
)


class ResponsesBody(GenerationBody):
    """A conversation to answer, as the newer of OpenAI's routes takes it. Nothing is stored."""

    input: InputField = Field(description="A user's text, or the items of a conversation.")
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: Int = Field(None, description="Most tokens to produce.")
    text: TextOptions | None = None
    tools: list[ResponsesTool] | None = Field(
        None, description="Functions that the model may call; at most 128.", max_length=MAX_TOOLS
    )
    tool_choice: ResponsesToolChoice | None = Field(
        None, description="none, auto, required, or the name of one function. auto if left out."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="Whether one answer may hold several calls. True."
    )
    top_logprobs: int | None = Field(
        None, description="With `include`: that many likeliest tokens of each, 0 to 20."
    )
    include: list[str] | None = Field(
        None, description="`message.output_text.logprobs` is the only one that there is."
    )
    truncation: Literal["disabled"] | None = Field(
        None, description="Too long an input is refused; nothing is cut out of it."
    )
    background: Literal[False] | None = None
    chat_template_kwargs: dict[str, object] | None = Field(
        None, description="More variables for the model's chat template."
    )
    reasoning: Anything = Field(None, description="Accepted; means nothing here.")
    previous_response_id: Anything = Field(
        None, description="Refused: nothing is stored. Send the whole conversation as `input`."
    )
    conversation: Anything = Field(None, description="Refused, for the same reason.")
    max_tool_calls: Anything = Field(None, description="Accepted; no tools are run here.")
    prompt: Anything = Field(None, description="Refused: there are no stored prompts.")

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())
