"""From the form that a caller wants to a grammar that a worker can follow.

Only `cluster.frontend.grammar_main` loads this: what callers send may take any time and memory
to understand, so it is done in a process that can be ended.
"""

import json
import random
import re
import time
from dataclasses import dataclass

from llguidance import LLMatcher, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from scheduler.errors import InvalidRequest
from scheduler.sampling import MAX_GRAMMAR_CHARS
from scheduler.structured import StructuredOutputs
from worker.grammar import GrammarFailed, check, new_matcher

COMMA, COLON = ", ?", ": ?"
"""One space is where most models have learned it, and small ones do not loop on it."""

WALK_TOKENS = 32
"""Followed before a grammar is accepted: some are cheap to build and dear to follow."""

_LOOSE_OPTIONS = ("coerce_one_of", "lenient")
"""Of llguidance: they let documents through that the schema forbids."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A grammar in llguidance's words, which was built once."""

    grammar: str
    build_s: float
    """CPU seconds that it took to build and to follow for `WALK_TOKENS`"""


def compile_grammar(wanted: StructuredOutputs, tokenizer: LLTokenizer) -> Checked:
    """The grammar of a form, built once to see that it can be.

    Raises:
        InvalidRequest: it is wrong, not supported or too large; `param` names the field.
    """
    kind = wanted.kind
    param = f"structured_outputs.{kind}"
    try:
        grammar = _WRITERS[kind](wanted)
    except (GrammarFailed, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise InvalidRequest(f"{_TITLES[kind]} cannot be followed: {reason}", param=param) from None
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(
            f"{_TITLES[kind]} becomes a grammar of {len(grammar)} characters, at most "
            f"{MAX_GRAMMAR_CHARS} may be",
            param=param,
        )
    return check_grammar(grammar, tokenizer, title=_TITLES[kind], param=param)


def check_grammar(
    grammar: str, tokenizer: LLTokenizer, *, title: str = "the grammar", param: str = "grammar"
) -> Checked:
    """Build a grammar once.

    Raises:
        InvalidRequest: as `compile_grammar`.
    """
    begin = time.process_time()
    try:
        matcher = new_matcher(tokenizer, grammar)
        warnings = matcher.get_grammar_warnings()
        _walk(matcher)
    except GrammarFailed as error:
        raise InvalidRequest(
            f"{title} cannot be followed: {_said_plainly(str(error))}", param=param
        ) from None
    if warnings:
        raise InvalidRequest(
            f"{title} cannot be followed in full: {_said_plainly(warnings[0])}", param=param
        )
    return Checked(grammar, time.process_time() - begin)


def _walk(matcher: LLMatcher) -> None:
    """Follow the grammar for some tokens, as a sequence would, to see what that costs."""
    chance = random.Random(0)
    for _ in range(WALK_TOKENS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        check(matcher)
        if matcher.is_stopped():
            return
        matcher.consume_token(_some_bit(mask, chance))
        check(matcher)


def _some_bit(mask: int, chance: random.Random) -> int:
    """The first bit of the mask from a place of chance on."""
    above = mask >> (start := chance.randrange(mask.bit_length()))
    return start + (above & -above).bit_length() - 1


def _json_grammar(wanted: StructuredOutputs) -> str:
    assert isinstance(wanted.json, str)
    try:
        schema = json.loads(wanted.json)
    except ValueError as error:
        raise GrammarFailed(f"it is not JSON: {error}") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarFailed(f"a JSON schema is an object, this is {wanted.json:.40}")
    if wanted.disable_additional_properties:
        _close_objects(schema)
    return _schema_grammar(schema, wanted)


def _json_object_grammar(wanted: StructuredOutputs) -> str:
    return _schema_grammar({"type": "object"}, wanted)


def _schema_grammar(schema: dict[str, object], wanted: StructuredOutputs) -> str:
    given = schema.get("x-guidance", {})
    if not isinstance(given, dict):
        raise GrammarFailed("x-guidance in a schema must be an object")
    for name in _LOOSE_OPTIONS:
        if given.get(name):
            raise GrammarFailed(f"x-guidance.{name} would let wrong documents through")
    options: dict[str, object] = {
        "whitespace_flexible": False,
        "item_separator": COMMA,
        "key_separator": COLON,
        **given,
    }
    if wanted.disable_any_whitespace:
        options |= {"item_separator": ",", "key_separator": ":"}
    if wanted.whitespace_pattern is not None:
        options |= {"item_separator": ",", "key_separator": ":"}
        options["whitespace_pattern"] = wanted.whitespace_pattern
    guided = {**schema, "x-guidance": options}
    return json.dumps({"grammars": [{"json_schema": guided}]}, ensure_ascii=False)


def _regex_grammar(wanted: StructuredOutputs) -> str:
    assert wanted.regex is not None
    backslashes = len(wanted.regex) - len(wanted.regex.rstrip("\\"))
    if backslashes % 2:
        raise GrammarFailed("it ends in a backslash that escapes nothing")
    return f"start: /{regex_to_lark(_without_ends(wanted.regex))}/"


def _choice_grammar(wanted: StructuredOutputs) -> str:
    assert wanted.choice is not None
    # A name in capitals makes it one expression, of which any number of texts can be a part.
    texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted.choice)
    return f"start: CHOICE\nCHOICE: {texts}"


_IS_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


def _own_grammar(wanted: StructuredOutputs) -> str:
    assert wanted.grammar is not None
    if not _IS_GBNF.search(wanted.grammar):
        return wanted.grammar
    try:
        return gbnf_to_lark(wanted.grammar)
    except Exception as error:  # the converter raises bare ones
        raise GrammarFailed(str(error)) from None


_WRITERS = {
    "json": _json_grammar,
    "json_object": _json_object_grammar,
    "regex": _regex_grammar,
    "choice": _choice_grammar,
    "grammar": _own_grammar,
}
_TITLES = {
    "json": "the JSON schema",
    "json_object": "json_object",
    "regex": "the regular expression",
    "choice": "the choice",
    "grammar": "the grammar",
}


def _without_ends(pattern: str) -> str:
    """The pattern without `^` and `$` around it: the whole output has to match anyway."""
    pattern = pattern.removeprefix("^")
    escapes = len(pattern) - len(pattern.removesuffix("$").rstrip("\\")) - 1
    return pattern[:-1] if pattern.endswith("$") and escapes % 2 == 0 else pattern


_VALUES = ("const", "default", "enum", "examples")
"""Keywords whose values are documents, not schemas."""


def _close_objects(schema: object) -> None:
    """Forbid other properties wherever properties are listed and nothing is said of others."""
    if isinstance(schema, list):
        for part in schema:
            _close_objects(part)
    if not isinstance(schema, dict):
        return
    if isinstance(schema.get("properties"), dict):
        schema.setdefault("additionalProperties", False)
    for name, part in schema.items():
        if name in ("properties", "patternProperties", "$defs", "definitions"):
            for each in part.values() if isinstance(part, dict) else ():
                _close_objects(each)
        elif name not in _VALUES:
            _close_objects(part)


_REWORDED = (
    (re.compile(r"Unimplemented keys: \[(.*)\]"), r"these keywords are not supported: \1"),
    (
        re.compile(r"oneOf constraints are not supported\..*"),
        "oneOf is supported only where its options plainly exclude each other; use anyOf",
    ),
    (re.compile(r"^Unsatisfiable schema: "), "nothing satisfies it: "),
    (re.compile(r"^NoExtension(Bias)?$"), "no text can ever complete it"),
)


def _said_plainly(message: str) -> str:
    """llguidance's message in the words of who wrote the schema."""
    first = message.split("\n<", 1)[0].strip()
    for pattern, words in _REWORDED:
        first = pattern.sub(words, first)
    return first if len(first) <= 500 else first[:500] + "…"
