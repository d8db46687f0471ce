"""From the form that a caller wants to a grammar: what is accepted, and what is refused how."""

import json
import random
from functools import cache

import pytest
from llguidance import LLTokenizer

from cluster.frontend.grammar import check_grammar, compile_grammar
from scheduler.errors import InvalidRequest
from scheduler.structured import StructuredOutputs
from tests.cluster.frontend.tiny_tokenizers import FAMILIES
from worker.grammar import GrammarFailed, new_matcher, read_tokenizer


@cache
def tokenizer(family: str = "llama3_like") -> LLTokenizer:
    return read_tokenizer(FAMILIES[family]().tokenizer_json.decode())


def grammar_of(**fields: object) -> str:
    wanted = StructuredOutputs(**fields)  # type: ignore[arg-type]
    return compile_grammar(wanted, tokenizer()).grammar


def accepts(grammar: str, text: str) -> bool:
    """Whether the text as a whole has the form."""
    matcher = new_matcher(tokenizer(), grammar)
    tokens = tokenizer().tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def refusal(**fields: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        grammar_of(**fields)
    return refused.value


# --- JSON -----------------------------------------------------------------------------------

PAIR = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "integer"}}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("options", "right", "wrong"),
    [
        (
            {},
            ['{"a":1,"b":[1,2]}', '{"a": 1, "b": [1, 2]}', '{"a":1, "b": [1,2]}'],
            [
                '{ "a": 1, "b": []}',
                '{"a":  1, "b": []}',
                '{\n"a": 1, "b": []}',
                '{"a": 1 ,"b": []}',
            ],
        ),
        (
            {"disable_any_whitespace": True},
            ['{"a":1,"b":[1,2]}'],
            ['{"a": 1,"b":[1,2]}', '{"a":1, "b":[1,2]}'],
        ),
        (
            {"whitespace_pattern": r"\n {0,2}| "},
            ['{\n  "a": 1,\n  "b": [ 1 , 2 ]\n}', '{"a":1,"b":[1,2]}'],
            ['{"a":  1,"b":[]}', '{"a":\n\n1,"b":[]}', '{\n   "a":1,"b":[]}'],
        ),
    ],
    ids=["default", "none", "own"],
)
def test_whitespace_is_bounded(
    options: dict[str, object], right: list[str], wrong: list[str]
) -> None:
    """Case 47: what has no bound is where small models loop."""
    grammar = grammar_of(json=PAIR, **options)

    assert [text for text in right if not accepts(grammar, text)] == []
    assert [text for text in wrong if accepts(grammar, text)] == []


@pytest.mark.parametrize("text", ["👩‍👩‍👧‍👦", "🇯🇵", "e\u0301", "日本語", "naïve", "שלום"])
def test_text_of_a_schema_is_written_as_it_is(text: str) -> None:
    """Case 52."""
    grammar = grammar_of(json={"enum": [text]})

    assert accepts(grammar, json.dumps(text, ensure_ascii=False))
    assert not accepts(grammar, json.dumps(text))


def test_objects_can_be_closed_where_properties_are_listed() -> None:
    schema = {
        "type": "object",
        "properties": {
            "open": {
                "type": "object",
                "properties": {"x": {"const": 1}},
                "additionalProperties": True,
            },
            "in_list": {
                "type": "array",
                "items": {"properties": {"y": {"const": 1}}, "type": "object"},
            },
            "value": {"const": {"properties": {"z": 1}}},
        },
    }
    grammar = grammar_of(json=schema, disable_additional_properties=True)

    assert accepts(grammar, '{"open":{"more":1},"in_list":[{"y":1},{}]}')
    assert accepts(grammar, '{"value":{"properties":{"z":1}}}')
    assert not accepts(grammar, '{"more":1}')
    assert not accepts(grammar, '{"in_list":[{"more":1}]}')
    assert accepts(grammar_of(json=schema), '{"in_list":[{"more":1}]}')


def test_true_and_an_empty_schema_are_any_json() -> None:
    for schema in (True, {}, "true", "{}"):
        grammar = grammar_of(json=schema)
        assert accepts(grammar, '[1,"a",{"b":null}]')
        assert not accepts(grammar, "a")


def test_a_json_object_is_an_object() -> None:
    grammar = grammar_of(json_object=True)

    assert accepts(grammar, '{"a":[1,{}]}')
    assert not accepts(grammar, "[]")


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "array", "uniqueItems": True}, '"uniqueItems"'),
        ({"not": {"type": "string"}}, '"not"'),
        ({"if": {"const": 1}, "then": {"const": 1}}, '"if", "then"'),
        ({"type": "object", "propertyNames": {"maxLength": 3}}, '"propertyNames"'),
        ({"type": "string", "format": "iri-reference"}, "iri-reference"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, "use anyOf"),
        ({"$ref": "https://example.com/schema"}, "https://example.com/schema"),
        ({"$ref": "#/$defs/nowhere"}, "nowhere"),
        ({"$ref": "#"}, "no text can ever complete it"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"type": "string", "pattern": "["}, "unclosed character class"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "nothing satisfies it"),
        ({"type": "integer", "minimum": "3"}, "minimum"),
        ({"type": "text"}, "text"),
        ({"x-guidance": {"lenient": True}}, "x-guidance.lenient"),
        ({"x-guidance": 5}, "x-guidance"),
        ("[1", "not JSON"),
        ("[1]", "an object"),
        ("false", "an object"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "nested too deeply"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_a_schema_asks_in_vain_is_named(schema: object, said: str) -> None:
    refused = refusal(json=schema)

    assert said in str(refused)
    assert str(refused).startswith("the JSON schema cannot be followed: ")
    assert refused.param == "structured_outputs.json"
    assert len(str(refused)) < 700
    assert "<" not in str(refused).replace("<string>", "")


# --- the others -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ("[0-9]+", ["0", "42"], ["", "4 2", "a42"]),
        ("^[0-9]+$", ["0", "42"], ["^4$", "42\n"]),
        (r"\$[0-9]\$", ["$1$"], ["$1", "1"]),
        (r"a\\$", ["a\\"], ["a", "a\\$"]),
        ("a/b|c", ["a/b", "c"], ["a/bc"]),
        ("(?i:ja)", ["ja", "JA"], ["nein"]),
        ("[äöü🙂]{2}", ["äö", "🙂ü"], ["ä", "ao"]),
        (".", ["a", "🙂"], ["\n", "ab"]),
    ],
)
def test_an_expression_means_the_whole_output(
    pattern: str, right: list[str], wrong: list[str]
) -> None:
    grammar = grammar_of(regex=pattern)

    assert [text for text in right if not accepts(grammar, text)] == []
    assert [text for text in wrong if accepts(grammar, text)] == []


def test_choices_are_taken_literally() -> None:
    texts = ["yes", "[a-z]+", 'say "no"', "back\\slash", "two\nlines", " 🙂", "\x07", "a/b"]
    grammar = grammar_of(choice=texts)

    assert [text for text in texts if not accepts(grammar, text)] == []
    assert [text for text in ("y", "abc", "yes ", "no") if accepts(grammar, text)] == []


def test_thousands_of_choices_are_no_burden() -> None:
    texts = [f"choice number {i} of many" for i in range(4000)]

    assert accepts(grammar_of(choice=texts), texts[-1])


def test_grammars_may_be_written_in_two_notations() -> None:
    for text in (
        'start: "a" b+\nb: "b" | "c"',
        'root ::= "a" b+\nb ::= "b" | "c"\n',
    ):
        grammar = grammar_of(grammar=text)
        assert accepts(grammar, "abcb")
        assert not accepts(grammar, "a")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?<=a)b"}, "look-around"),
        ({"regex": "a{5,2}"}, "invalid repetition"),
        ({"regex": "a\\"}, "ends in a backslash"),
        ({"grammar": "start: nowhere"}, "nowhere"),
        ({"grammar": 'begin: "a"'}, "start"),
        ({"grammar": 'root ::= "a'}, "Unexpected end"),
        ({"grammar": 'root ::= nowhere "a"'}, "nowhere"),
        ({"grammar": "start: A\nA: B\nB: A"}, "circular"),
        ({"grammar": "start: <|nowhere|>"}, "nowhere"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said(fields: dict[str, object], said: str) -> None:
    refused = refusal(**fields)

    assert said in str(refused)
    assert refused.param == f"structured_outputs.{next(iter(fields))}"


def test_special_tokens_can_be_part_of_a_grammar() -> None:
    grammar = grammar_of(grammar='start: <|im_start|> "a"')

    matcher = new_matcher(tokenizer(), grammar)
    (mark,) = tokenizer().tokenize_str("<|im_start|>", parse_special=True)
    assert matcher.try_consume_tokens([mark]) == 1


def test_a_grammar_of_llguidances_own_is_checked_as_it_is() -> None:
    assert check_grammar("start: /a/", tokenizer()).grammar == "start: /a/"
    with pytest.raises(InvalidRequest, match="cannot be followed") as refused:
        check_grammar("start: b", tokenizer())
    assert refused.value.param == "grammar"


@pytest.mark.parametrize("family", ["llama3_like", "llama2_like"])
def test_both_families_of_tokenizers_can_be_used(family: str) -> None:
    wanted = StructuredOutputs(json={"enum": ["the dog", "日本"]})

    compile_grammar(wanted, tokenizer(family))


def test_a_tokenizer_that_is_not_known_is_said_to_be() -> None:
    with pytest.raises(GrammarFailed, match=r"cannot use the model's tokenizer: .*Metaspace"):
        tokenizer("unigram")


# --- and whatever else is sent --------------------------------------------------------------

KEYWORDS = (
    "type", "properties", "required", "items", "prefixItems", "enum", "const", "anyOf", "allOf",
    "oneOf", "$ref", "$defs", "minimum", "maximum", "multipleOf", "minLength", "maxLength",
    "pattern", "format", "minItems", "maxItems", "additionalProperties", "patternProperties",
    "minProperties", "maxProperties", "x-guidance", "exclusiveMinimum", "$schema", "$id", "not",
)  # fmt: skip
VALUES = (
    0, -1, 3.5, 1e308, -(2**70), 10**25, True, False, None, "string", "object", "array", "number",
    "", "^a", "[", "(a|b)*", "#", "#/$defs/a", "🙂", "date", "\x00", "\\",
    "http://json-schema.org/draft-07/schema#",
)  # fmt: skip
SIGNS = (
    "a", "b", "(", ")", "[", "]", "{", "}", "*", "+", "?", "|", "\\", "/", '"', ":", "::=", "start",
    "root", "\n", " ", "<", ">", "%json", "%ignore", "1", ",", ".", "~", "&", "^", "$", "#", "🙂",
)  # fmt: skip


def some_schema(chance: random.Random, depth: int = 3) -> dict[str, object]:
    return {chance.choice(KEYWORDS): some_value(chance, depth) for _ in range(chance.randrange(5))}


def some_value(chance: random.Random, depth: int) -> object:
    kind = chance.randrange(4) if depth else 0
    if kind <= 1:
        return chance.choice(VALUES)
    if kind == 2:
        return [some_value(chance, depth - 1) for _ in range(chance.randrange(4))]
    inner = some_schema(chance, depth - 1)
    return inner if chance.random() < 0.8 else {"a": inner, "lenient": 1, "item_separator": 5}


def test_whatever_is_sent_becomes_a_grammar_or_is_refused() -> None:
    chance = random.Random(0)
    num_grammars, refusals = 0, []
    for number in range(1500):
        text = "".join(chance.choices(SIGNS, k=chance.randrange(1, 20)))
        fields: dict[str, object] = (
            {"json": some_schema(chance)},
            {"regex": text},
            {"grammar": chance.choice(("start: ", "root ::= ", "")) + text},
        )[number % 3]
        try:
            num_grammars += bool(grammar_of(**fields))
        except InvalidRequest as error:
            refusals.append(str(error))

    assert 100 < num_grammars < 1400
    assert max(map(len, refusals)) < 800
    assert not any("\n<" in message for message in refusals)
