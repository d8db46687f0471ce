"""The form that an output must have, as a caller says it.

Names follow vLLM's. What it means is known to the front end alone, which makes one grammar of
it (`SamplingParams.grammar`); here it is only checked to be well said.
"""

import json
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import force_setattr

from scheduler.errors import InvalidRequest, wrong_value

MAX_STRUCTURE_CHARS = 2**18
"""Of a schema, an expression, a grammar, or all choices together."""
MAX_CHOICES = 4096


class StructuredOutputs(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Exactly one of `json`, `json_object`, `regex`, `choice` and `grammar`.

    Raises:
        InvalidRequest: none or several of them, or one of the wrong type or size.
    """

    json: str | bool | dict[str, object] | None = None
    """A JSON schema, as text or as what the text says; the output is a document valid by it."""
    json_object: bool = False
    """The output is any JSON object."""
    regex: str | None = None
    """The whole output matches this regular expression (Rust's syntax; no look-around)."""
    choice: Sequence[str] | None = None
    """The output is one of these texts."""
    grammar: str | None = None
    """The output is derived from this grammar, in Lark's notation or in GBNF's (`::=`)."""
    whitespace_pattern: str | None = None
    """Of JSON: a regular expression for what may stand between tokens, each time once."""
    disable_any_whitespace: bool = False
    """Of JSON: none at all, not even one space after a comma or colon."""
    disable_additional_properties: bool = False
    """Of a JSON schema: objects that list properties have no others, unless they say so."""

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            _check_flag(self, name)
        if self.json is not None:
            force_setattr(self, "json", _schema_text(self.json))
        if self.choice is not None:
            force_setattr(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar", "whitespace_pattern"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise InvalidRequest(
                f"structured_outputs must have exactly one of {', '.join(_KINDS)}; it has {found}",
                param="structured_outputs",
            )
        self._check_json_options()

    @property
    def kind(self) -> str:
        """The name of the one that is given."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False))

    def _check_json_options(self) -> None:
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise InvalidRequest(
                "disable_any_whitespace and whitespace_pattern exclude each other",
                param="structured_outputs.whitespace_pattern",
            )
        for name in _JSON_OPTIONS:
            if getattr(self, name) and self.kind not in ("json", "json_object"):
                raise InvalidRequest(
                    f"{name} is about JSON; it means nothing for {self.kind}",
                    param=f"structured_outputs.{name}",
                )


_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_JSON_OPTIONS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")


def _check_flag(structure: StructuredOutputs, name: str) -> None:
    value = getattr(structure, name)
    if value is None:
        force_setattr(structure, name, False)
    elif not isinstance(value, bool):
        raise wrong_value(f"structured_outputs.{name}", "true or false", value)


def _schema_text(given: object) -> str:
    """The schema as JSON text, which keeps the order of its properties."""
    name = "structured_outputs.json"
    if isinstance(given, dict | bool):
        try:
            given = json.dumps(given, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"{name} is not JSON: {error}", param=name) from error
    if not isinstance(given, str):
        raise wrong_value(name, "a JSON schema, as a map or as text", given)
    _check_text("json", given)
    return given


def _choices(given: object) -> tuple[str, ...]:
    name = "structured_outputs.choice"
    if not isinstance(given, list | tuple) or not all(isinstance(one, str) for one in given):
        raise wrong_value(name, "a list of texts", given)
    if not given or not all(given):
        raise wrong_value(name, "a list of at least one text, none of them empty", list(given))
    if len(given) > MAX_CHOICES:
        raise InvalidRequest(
            f"{name} has {len(given)} texts, at most {MAX_CHOICES} may be", param=name
        )
    _check_text("choice", "".join(given))
    return tuple(dict.fromkeys(given))


def _check_text(name: str, text: object) -> None:
    param = f"structured_outputs.{name}"
    if not isinstance(text, str) or not text:
        raise wrong_value(param, "a non-empty text", text)
    if len(text) > MAX_STRUCTURE_CHARS:
        raise InvalidRequest(
            f"{param} has {len(text)} characters, at most {MAX_STRUCTURE_CHARS} may be",
            param=param,
        )
    if not text.isascii() and any("\ud800" <= mark <= "\udfff" for mark in text):
        raise wrong_value(param, "valid Unicode", text)
