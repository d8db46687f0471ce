"""Which answers the grammars of tool calls let through."""

import json
from collections.abc import Mapping

import pytest
from tokenizers import Tokenizer as RawTokenizer

from cluster.api.openai.tools.formats import HERMES, LLAMA3, ToolFormat
from cluster.api.openai.tools.grammar import ANY_ARGUMENTS, NO_ARGUMENTS, CallGrammar, Schema
from cluster.frontend.tokenizer_files import TokenizerFiles
from tests.cluster.frontend.tiny_tokenizers import llama3_like, make_files
from worker.grammar import new_matcher, read_tokenizer

WEATHER: Schema = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TREE: Schema = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"$ref": "#/$defs/node"}},
            "additionalProperties": False,
        }
    },
}
SCHEMAS = {"weather": WEATHER, "now": NO_ARGUMENTS, "tree": TREE}


def with_special_marks() -> TokenizerFiles:
    """A tokenizer that has the marks of calls as special tokens, as some of Hermes have."""
    raw = RawTokenizer.from_buffer(llama3_like().tokenizer_json)
    raw.add_special_tokens(["<tool_call>", "</tool_call>"])
    return make_files(raw, bos_token="<|begin|>", eos_token="<|im_end|>")


def fits(grammar: str, text: str, files: TokenizerFiles | None = None) -> bool:
    """Whether an answer may be this text, as its tokenizer writes it."""
    source = (files or llama3_like()).tokenizer_json
    matcher = new_matcher(read_tokenizer(source.decode()), grammar)
    ids = RawTokenizer.from_buffer(source).encode(text, add_special_tokens=False).ids
    return all(matcher.consume_token(each) for each in ids) and bool(matcher.is_accepting())


def call(name: str, arguments: object, tool_format: ToolFormat = HERMES) -> str:
    said = json.dumps({"name": name, tool_format.arguments_key: arguments}, ensure_ascii=False)
    return f"<tool_call>\n{said}\n</tool_call>" if tool_format is HERMES else said


def make(
    tool_format: ToolFormat = HERMES,
    *,
    schemas: Mapping[str, Schema] = SCHEMAS,
    most_calls: int | None = None,
    special: frozenset[str] = frozenset(),
) -> CallGrammar:
    return CallGrammar(
        tool_format=tool_format, schemas=schemas, most_calls=most_calls, special=special
    )


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA3], ids=["hermes", "llama3"])
def test_forced_answers_are_calls_with_valid_arguments(tool_format: ToolFormat) -> None:
    grammar = make(tool_format).forced()
    separator = "\n" if tool_format is HERMES else "; "
    right = [
        call("weather", {"city": "Köln 🌧", "days": 3}, tool_format),
        call("now", {}, tool_format),
        call("tree", {"next": {"next": {}}}, tool_format),
    ]
    for text in (*right, separator.join(right)):
        assert fits(grammar, text), text
    for text in (
        "",
        "Well: " + right[0],
        right[0] + " ok",
        call("weather", {"days": 3}, tool_format),
        call("weather", {"city": 5}, tool_format),
        call("now", {"a": 1}, tool_format),
        call("rain", {}, tool_format),
        call("tree", {"prev": {}}, tool_format),
    ):
        assert not fits(grammar, text), text


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA3], ids=["hermes", "llama3"])
def test_where_calls_are_not_parallel_one_is_all(tool_format: ToolFormat) -> None:
    grammar = make(tool_format, most_calls=1).forced()
    one = call("now", {}, tool_format)
    assert fits(grammar, one)
    assert not fits(grammar, f"{one}\n{one}")
    assert not fits(grammar, f"{one}; {one}")


def test_an_answer_may_be_json_instead_of_calls() -> None:
    content: Schema = {
        "type": "object",
        "properties": {"answer": {"type": "boolean"}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    grammar = make().forced_or(content)
    assert fits(grammar, '{"answer": true}')
    assert fits(grammar, call("now", {}))
    assert not fits(grammar, '{"answer": 5}')
    assert not fits(grammar, "true")


def test_in_free_text_whatever_begins_as_a_call_is_one() -> None:
    grammar = make(schemas={**SCHEMAS, "any": ANY_ARGUMENTS}).anywhere()
    one = call("weather", {"city": "Rome"})
    for text in (
        "",
        "Hello <b> {x}",
        one,
        f"Let me see.\n{one}\n{one} Done",
        call("any", {"x": [1]}),
    ):
        assert fits(grammar, text), text
    for text in ("<tool_call>", "<tool_call>x</tool_call>", call("weather", {"days": 1})):
        assert not fits(grammar, text), text
    single = make(most_calls=1).anywhere()
    assert fits(single, f"Well: {one}")
    assert not fits(single, call("weather", {"days": 1}))


def test_marks_that_are_special_tokens_are_asked_for_as_such() -> None:
    files, marks = with_special_marks(), frozenset({"<tool_call>", "</tool_call>"})
    one = call("weather", {"city": "Rome"})
    special = make(special=marks)
    for grammar in (special.forced(), special.anywhere(), special.forced_or({"type": "object"})):
        assert fits(grammar, one, files)
        assert not fits(grammar, call("weather", {"days": 1}), files)
    assert not fits(make().forced(), one, files), "no letters spell a special token"


def test_schemas_say_whatever_they_want_in_their_texts() -> None:
    odd: Schema = {
        "type": "object",
        "description": 'x ::= "y"\n"""\n// %json /a/',
        "properties": {'a"b\n': {"const": "é"}},
        "required": ['a"b\n'],
        "additionalProperties": False,
    }
    grammar = make(schemas={"f": odd}).forced()
    assert fits(grammar, call("f", {'a"b\n': "é"}))
