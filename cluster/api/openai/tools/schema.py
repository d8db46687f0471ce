"""Tools and the choice among them, as request bodies say it (chat's shape)."""

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

MAX_TOOLS = 128

FunctionName: TypeAlias = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class ToolsModel(BaseModel):
    """A part of a body: types as JSON has them, unknown fields let through."""

    model_config = ConfigDict(strict=True, extra="allow")


class FunctionDefinition(ToolsModel):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, object] | None = Field(
        None, description="JSON schema of the arguments. None: the function takes none."
    )
    strict: bool | None = Field(
        None, description="Whether the arguments of every call must be valid by the schema."
    )


class ChatTool(ToolsModel):
    """A tool; functions are all that there is."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionReference(ToolsModel):
    """A function by its name."""

    name: FunctionName


class NamedToolChoice(ToolsModel):
    """The model must call this function."""

    type: Literal["function"]
    function: FunctionReference


class ToolReference(ToolsModel):
    """A tool by its name."""

    type: Literal["function"]
    function: FunctionReference


class AllowedTools(ToolsModel):
    """Some of the tools, by name."""

    mode: Literal["auto", "required"]
    tools: list[ToolReference] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedToolChoice(ToolsModel):
    """The model may, or must, call some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ChatToolChoice: TypeAlias = (
    Literal["none", "auto", "required"]
    | Annotated[NamedToolChoice | AllowedToolChoice, Field(discriminator="type")]
)
