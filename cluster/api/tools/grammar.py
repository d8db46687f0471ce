"""Grammars that keep an answer to calls of the tools offered, in llguidance's Lark."""

import json
from collections.abc import Mapping

from cluster.api.tools.formats import ToolFormat

Schemas = Mapping[str, dict[str, object] | None]
"""JSON schemas of arguments, by the function's name."""

_NOTHING: dict[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}
_AS_PYTHON_PRINTS = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""As templates print calls, and so as models learn them; also leaves no room for endless space."""


def forced_calls(tool_format: ToolFormat, schemas: Schemas, most_calls: int | None) -> str:
    """An answer that is one call, or if more may be, several, and nothing else."""
    more = "" if most_calls == 1 else f" ({_quoted(_separator(tool_format))} call)*"
    return "\n".join([f"start: call{more}", *_call_rules(tool_format, schemas)]) + "\n"


def _separator(tool_format: ToolFormat) -> str:
    return "\n" if tool_format.closing else "; "


def _call_rules(tool_format: ToolFormat, schemas: Schemas) -> list[str]:
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(schemas)))]
    for i, (name, schema) in enumerate(schemas.items()):
        before, after = _around_arguments(tool_format, name)
        rules.append(f"call_{i}: {_quoted(before)} arguments_{i} {_quoted(after)}")
        rules.append(f"arguments_{i}: %json {json.dumps(_object_schema(schema))}")
    return rules


def _around_arguments(tool_format: ToolFormat, name: str) -> tuple[str, str]:
    """What a call is, before and after its arguments."""
    head = f'{{"name": {json.dumps(name)}, "{tool_format.arguments_key}": '
    if not tool_format.closing:
        return head, "}"
    return f"{tool_format.opening}\n{head}", f"}}\n{tool_format.closing}"


def _object_schema(schema: dict[str, object] | None) -> dict[str, object]:
    """A schema stands as a document of its own, so that references in it hold."""
    shown = _NOTHING if schema is None else {"type": "object", **schema}
    return {**shown, "x-guidance": _AS_PYTHON_PRINTS}


def _quoted(text: str) -> str:
    return json.dumps(text)
