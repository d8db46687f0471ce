"""What one request may, must or must not do with tools."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from cluster.api.openai.prompts import Drafting
from cluster.api.openai.tools.formats import FORMATS, ToolFormat, format_of
from cluster.api.openai.tools.grammar import ANY_ARGUMENTS, NO_ARGUMENTS, CallGrammar, Schema
from cluster.api.openai.tools.parser import ToolParser
from cluster.api.openai.tools.shown import template_for_tools
from cluster.frontend.draft import Draft
from cluster.frontend.tokenizer import Tokenizer
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

    def schema_for(self, mode: Mode) -> Schema:
        """What its arguments are held to: without `strict`, a free answer may try any."""
        if mode != "required" and not self.is_strict:
            return ANY_ARGUMENTS
        return NO_ARGUMENTS if self.parameters is None else self.parameters

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

    def draft(self, drafting: Drafting, ids: list[int], tokenizer: Tokenizer | None) -> Draft:
        """The request whose answer holds calls as chosen, with their marks in its text.

        Raises:
            InvalidRequest: it cannot be served.
        """
        special = self._special_marks(tokenizer)
        sampling = self._guided(drafting.sampling, special)
        if special:
            sampling = msgspec.structs.replace(sampling, skip_special_tokens=False)
        try:
            draft = dataclasses.replace(drafting, sampling=sampling).draft(ids, tokenizer)
        except InvalidRequest as error:
            if error.param != "grammar":
                raise
            raise InvalidRequest(f"calls of these tools: {error}", param="tools") from error
        return dataclasses.replace(draft, hides_end=bool(special))

    def _guided(self, sampling: SamplingParams, special: frozenset[str]) -> SamplingParams:
        """The sampling that keeps the answer to the choice."""
        grammar = CallGrammar(
            tool_format=self.tool_format,
            schemas={each.name: each.schema_for(self.choice.mode) for each in self._callable()},
            most_calls=self.most_calls,
            special=special,
        )
        wanted = sampling.structured_outputs
        if self.choice.mode == "required":
            text = grammar.forced()
        elif wanted is not None:
            text = grammar.forced_or(_content_schema(wanted))
        elif self.tool_format.closing and any(each.is_strict for each in self._callable()):
            text = grammar.anywhere()
        else:
            return sampling
        return msgspec.structs.replace(sampling, structured_outputs=None, grammar=text)

    def _special_marks(self, tokenizer: Tokenizer | None) -> frozenset[str]:
        """Marks of the format that the tokenizer would leave out of the text."""
        if tokenizer is None:
            return frozenset()
        marks = filter(None, (self.tool_format.opening, self.tool_format.closing))
        return frozenset(
            mark for mark in marks if tokenizer.token_id(mark) in tokenizer.special_ids
        )

    def parser(self, new_id: Callable[[str], str]) -> ToolParser:
        """A reader for one output.

        Args:
            new_id: makes the id of a call, which begins with the text given.
        """
        return ToolParser(
            self.tool_format,
            [each.name for each in self._callable()],
            new_id=lambda: new_id("call_"),
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


def _content_schema(wanted: StructuredOutputs) -> Schema:
    """Of an answer that is no call."""
    if wanted.kind == "json_object":
        return {"type": "object"}
    schema: object = None
    with contextlib.suppress(ValueError):
        schema = json.loads(wanted.json) if isinstance(wanted.json, str) else None
    if not isinstance(schema, dict):
        raise InvalidRequest(
            f"structured_outputs.{wanted.kind} and tools cannot be had together, unless it is a "
            "JSON schema, or tool_choice is none or required",
            param="structured_outputs",
        )
    return schema


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
