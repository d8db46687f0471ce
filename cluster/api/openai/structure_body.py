"""How a body says what form its output must have: as OpenAI does, and as vLLM does."""

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, SkipValidation

Schema: TypeAlias = Annotated[
    dict[str, object] | bool | str | None,
    SkipValidation,
]


class ResponseFormatText(BaseModel):
    """Any text."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["text"]


class ResponseFormatJsonObject(BaseModel):
    """Any JSON object."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["json_object"]


class NamedSchema(BaseModel):
    """A JSON schema with a name."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str | None = Field(None, description="Accepted; means nothing here.")
    description: str | None = Field(None, description="Accepted; means nothing here.")
    schema_: dict[str, object] = Field(alias="schema", description="The JSON schema.")
    strict: bool | None = Field(None, description="Accepted; the output always keeps to it.")


class ResponseFormatJsonSchema(BaseModel):
    """JSON by a schema."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat: TypeAlias = Annotated[
    ResponseFormatText | ResponseFormatJsonObject | ResponseFormatJsonSchema,
    Field(discriminator="type"),
]


class StructuredOutputsBody(BaseModel):
    """vLLM's way: exactly one of `json`, `json_object`, `regex`, `choice` and `grammar`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    schema_: Schema = Field(None, alias="json", description="A JSON schema, or its text.")
    json_object: Annotated[bool | None, SkipValidation] = Field(
        None, description="Any JSON object."
    )
    regex: Annotated[str | None, SkipValidation] = Field(
        None, description="The whole output matches it."
    )
    choice: Annotated[list[str] | None, SkipValidation] = Field(
        None, description="The output is one of these."
    )
    grammar: Annotated[str | None, SkipValidation] = Field(
        None, description="A grammar in Lark's notation or in GBNF's."
    )
    whitespace_pattern: Annotated[str | None, SkipValidation] = Field(
        None, description="Of JSON: what may stand between its tokens, once each."
    )
    disable_any_whitespace: Annotated[bool | None, SkipValidation] = Field(
        None, description="Of JSON: no space after commas and colons either."
    )
    disable_additional_properties: Annotated[bool | None, SkipValidation] = Field(
        None, description="Of JSON schemas: objects have their listed properties alone."
    )
