"""What one request may, must or must not do with tools."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from msgspec.structs import replace

from cluster.api.tools.formats import FORMATS, ToolFormat, format_of
from cluster.api.tools.grammar import forced_calls
from cluster.api.tools.parser import ToolParser
from cluster.api.tools.shown import template_for_tools
from scheduler.errors import InvalidRequest
from scheduler.sampling import SamplingParams
from scheduler.structured import StructuredOutputs

Mode: TypeAlias = Literal["none", "auto", "required"]
ParserName: TypeAlias = Literal["auto", "hermes", "llama3", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function that a request offers."""

    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    """JSON schema of its arguments; None: it takes none."""
    is_strict: bool = False

    def described(self) -> dict[str, object]:
        """As chat templates expect it."""
        function: dict[str, object] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Whether functions may or must be called, and which."""

    mode: Mode = "auto"
    names: tuple[str, ...] | None = None
    """None: all."""
    is_parallel: bool = True
    """Whether one answer may hold several calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of one request, and how its model writes calls."""

    functions: tuple[Function, ...]
    """Those that the model is shown."""
    choice: ToolChoice
    tool_format: ToolFormat

    @property
    def described(self) -> list[dict[str, object]]:
        return [function.described() for function in self.functions]

    @property
    def most_calls(self) -> int | None:
        return None if self.choice.is_parallel else 1

    def guided(self, sampling: SamplingParams) -> SamplingParams:
        """The sampling that keeps the answer to the choice, where something must be called."""
        if self.choice.mode != "required":
            return sampling
        schemas = {each.name: each.parameters for each in self._callable()}
        grammar = forced_calls(self.tool_format, schemas, self.most_calls)
        return replace(sampling, structured_outputs=StructuredOutputs(grammar=grammar))

    def parser(self) -> ToolParser:
        """A reader for one output."""
        return ToolParser(
            self.tool_format,
            [each.name for each in self._callable()],
            new_id=new_call_id,
            most_calls=self.most_calls,
        )

    def _callable(self) -> tuple[Function, ...]:
        names = self.choice.names
        return tuple(each for each in self.functions if names is None or each.name in names)


def tool_use_of(
    functions: Sequence[Function],
    choice: ToolChoice,
    *,
    parser: ParserName,
    templates: Mapping[str, str],
) -> ToolUse | None:
    """The use of tools that a request asks for; None if it is to use none.

    Args:
        parser: the setting `tool_parser`.
        templates: the model's chat templates, which show how it writes calls.
    Raises:
        InvalidRequest: a choice that the tools do not allow, or no parser to read calls with.
    """
    if not functions:
        if choice.mode == "required" or choice.names:
            raise InvalidRequest(
                "tool_choice speaks of calls, but there are no tools", param="tool_choice"
            )
        return None
    _check_names(functions, choice)
    if choice.mode == "none":
        return None
    if parser == "none":
        raise InvalidRequest(
            "this server does not read tool calls (tool_parser=none); leave out tools, or say "
            "tool_choice=none",
            param="tools",
        )
    template = template_for_tools(templates)
    tool_format = format_of(template) if parser == "auto" else FORMATS[parser]
    return ToolUse(functions=tuple(functions), choice=choice, tool_format=tool_format)


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _check_names(functions: Sequence[Function], choice: ToolChoice) -> None:
    names = [function.name for function in functions]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InvalidRequest(f"tools has two functions named {name!r}", param="tools")
    for name in choice.names or ():
        if name not in names:
            raise InvalidRequest(
                f"tool_choice names the function {name!r}; tools has {', '.join(names)}",
                param="tool_choice",
            )
