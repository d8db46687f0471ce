"""Grammars that keep an answer to calls of the tools offered, in llguidance's Lark."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from cluster.api.openai.tools.formats import ToolFormat

Schema: TypeAlias = dict[str, object]

NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_ARGUMENTS: Schema = {"type": "object"}

_AS_TEMPLATES_PRINT = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
}
"""And so as models learn it; also leaves no room for endless white space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallGrammar:
    """The calls that an answer may hold, each written as chat templates write earlier ones."""

    tool_format: ToolFormat
    schemas: Mapping[str, Schema]
    """Of each function's arguments. Each is a document of its own, so references in it hold."""
    most_calls: int | None
    special: frozenset[str] = frozenset()
    """Those marks of the format that are special tokens, which no letters spell."""

    def forced(self) -> str:
        """An answer that is one call or more, and nothing else."""
        return _lines([f"start: {self._calls}", *self._call_rules(self.tool_format.opening)])

    def forced_or(self, content: Schema) -> str:
        """An answer that is calls, or JSON by a schema."""
        document = json.dumps({"x-guidance": _AS_TEMPLATES_PRINT, **content})
        return _lines(
            [
                f"start: {self._calls} | content",
                f"content: %json {document}",
                *self._call_rules(self.tool_format.opening),
            ]
        )

    def anywhere(self) -> str:
        """An answer of any text, in which whatever begins as a call is one.

        The format must have marks: text that leads up to one is found by it.
        """
        opening = self.tool_format.opening
        assert self.tool_format.closing, "without marks, any brace could begin a call"
        times = "?" if self.most_calls == 1 else "*"
        if opening in self.special:
            found = f"opened: TEXT {opening}"
        else:
            found = f"opened[lazy]: TEXT {_quoted(opening)}"
        return _lines(
            [f"start: (opened call){times} TEXT", found, r"TEXT: /(.|\n)*/", *self._call_rules("")]
        )

    @property
    def _calls(self) -> str:
        separator = "\n" if self.tool_format.closing else "; "
        return "call" if self.most_calls == 1 else f"call ({_quoted(separator)} call)*"

    def _call_rules(self, opening: str) -> list[str]:
        rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(self.schemas)))]
        for i, (name, schema) in enumerate(self.schemas.items()):
            head = f'{{"name": {json.dumps(name)}, "{self.tool_format.arguments_key}": '
            if self.tool_format.closing:
                before = (*self._mark(opening), _quoted(f"\n{head}"))
                after = (_quoted("}\n"), *self._mark(self.tool_format.closing))
            else:
                before, after = (_quoted(head),), (_quoted("}"),)
            document = json.dumps({"type": "object", **schema, "x-guidance": _AS_TEMPLATES_PRINT})
            rules.append(f"call_{i}: {' '.join((*before, f'arguments_{i}', *after))}")
            rules.append(f"arguments_{i}: %json {document}")
        return rules

    def _mark(self, mark: str) -> tuple[str, ...]:
        if not mark:
            return ()
        return (mark if mark in self.special else _quoted(mark),)


def _quoted(text: str) -> str:
    return json.dumps(text)


def _lines(rules: Iterable[str]) -> str:
    return "\n".join(rules) + "\n"
