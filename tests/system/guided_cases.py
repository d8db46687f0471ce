"""200 forms of an output, and for each a judge that knows nothing of how it was made.

Sizes are bounded where a model of 135M parameters at temperature 1 would not come to an end.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jsonschema import Draft202012Validator

from scheduler.structured import StructuredOutputs

Schema = dict[str, object]
Judge = Callable[[str], None]
"""Raises for a text that does not have the form."""


@dataclass(frozen=True, slots=True)
class GuidedCase:
    name: str
    wanted: StructuredOutputs
    judge: Judge


# --- JSON schemas ---------------------------------------------------------------------------

WORD: Schema = {"type": "string", "maxLength": 12}
SHORT: Schema = {"type": "string", "minLength": 1, "maxLength": 6}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 999}
FLAG: Schema = {"type": "boolean"}
RATIO: Schema = {"type": "number", "minimum": 0, "maximum": 1}


def closed(properties: dict[str, object], optional: tuple[str, ...] = ()) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def many(items: object, least: int, most: int) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


OBJECTS: dict[str, Schema] = {
    "person": closed({"name": SHORT, "age": COUNT}),
    "point": closed({"x": RATIO, "y": RATIO, "z": RATIO}),
    "optional_middle": closed({"first": SHORT, "second": COUNT, "third": FLAG}, ("second",)),
    "all_optional": closed({"a": COUNT, "b": FLAG, "c": SHORT}, ("a", "b", "c")),
    "no_properties": closed({}),
    "one_flag": closed({"ok": FLAG}),
    "null_property": closed({"nothing": {"type": "null"}}),
    "nested_once": closed({"inner": closed({"value": COUNT})}),
    "nested_four": closed({"a": closed({"b": closed({"c": closed({"d": FLAG})})})}),
    "two_branches": closed({"left": closed({"n": COUNT}), "right": closed({"s": SHORT})}),
    "address": closed(
        {
            "street": WORD,
            "number": {"type": "integer", "minimum": 1, "maximum": 200},
            "city": WORD,
            "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        }
    ),
    "order": closed(
        {
            "id": {"type": "string", "pattern": "^ord-[a-f0-9]{6}$"},
            "lines": many(closed({"sku": SHORT, "quantity": COUNT}), 1, 3),
            "paid": FLAG,
        }
    ),
    "names_with_letters": closed({"größe": COUNT, "ключ": FLAG, "名前": SHORT, "🔑": COUNT}),
    "names_with_signs": closed({'a"b': COUNT, "c\\d": FLAG, "e f": COUNT, "g/h": FLAG, "": COUNT}),
    "many_flags": closed({f"flag_{i}": FLAG for i in range(10)}),
    "array_inside": closed({"values": many(COUNT, 0, 4), "mean": {"type": "number"}}),
    "matrix": closed(
        {"rows": many(many({"type": "integer", "maximum": 9, "minimum": 0}, 2, 2), 2, 2)}
    ),
    "with_title_and_default": {
        **closed({"unit": {"enum": ["m", "km"], "default": "m", "description": "of length"}}),
        "title": "Length",
        "$schema": "https://json-schema.org/draft/2020-12/schema",
    },
    "required_not_listed": {
        "type": "object",
        "required": ["k"],
        "additionalProperties": COUNT,
        "maxProperties": 1,
    },
    "map_of_counts": {"type": "object", "additionalProperties": COUNT, "maxProperties": 3},
    "pattern_properties": {
        "type": "object",
        "patternProperties": {"^x[0-9]{1,2}$": COUNT},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 2,
    },
    "weather_call": closed(
        {
            "name": {"const": "get_weather"},
            "arguments": closed({"city": WORD, "unit": {"enum": ["C", "F"]}}),
        }
    ),
}

ENUMS: dict[str, Schema] = {
    "emoji": {"enum": ["🙂", "🎉🎉", "👩‍👩‍👧‍👦", "🇺🇦", "👍🏽"]},
    "cjk": {"enum": ["東京", "北京市", "서울특별시", "ありがとう"]},
    "accents": {"enum": ["naïve", "Ångström", "e\u0301te\u0301", "Zürich"]},
    "right_to_left": {"enum": ["שלום", "مرحبا بالعالم"]},
    "mixed_types": {"enum": [1, "one", None, True, 2.5, -3]},
    "numbers": {"enum": [0, 10, 100, 1000]},
    "one_value": {"const": "exactly this"},
    "const_object": {"const": {"a": [1, 2, {"b": None}], "c": "d"}},
    "const_array": {"const": ["x", 1, True]},
    "enum_of_objects": {"enum": [{"k": 1}, {"k": 2}, []]},
    "quotes_and_slashes": {"enum": ['say "hi"', "back\\slash", "a/b", "tab\there", "line\nend"]},
    "control_letters": {"enum": ["bell\u0007", "null\u0000end"]},
    "prefixes_of_each_other": {"enum": ["a", "aa", "aaa", "aaaa"]},
    "empty_text_too": {"enum": ["", "not empty"]},
    "in_object": closed({"mood": {"enum": ["😀", "😐", "😢"]}, "ort": {"enum": ["Köln", "東京"]}}),
    "in_array": many({"enum": ["♠", "♥", "♦", "♣"]}, 2, 4),
    "family": {"const": "👨‍👩‍👧‍👦 und 🏳️‍🌈"},
    "long_text": {"const": "The quick brown fox jumps over the lazy dog, twice a day."},
    "sixty": {"enum": [f"value number {i}" for i in range(60)]},
    "typed_enum": {"type": "string", "enum": ["red", "green", "blue"]},
}

NUMBERS: dict[str, Schema] = {
    **{
        f"integer_{low}_{high}": {"type": "integer", "minimum": low, "maximum": high}
        for low, high in ((0, 0), (0, 9), (1, 12), (-5, 5), (-100, -7), (17, 4242), (-1, 10**9))
    },
    **{
        f"number_{low}_{high}": {"type": "number", "minimum": low, "maximum": high}
        for low, high in ((0, 1), (-1.5, 2.25), (0.1, 0.2), (99, 101), (-3, -2))
    },
    "exclusive": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 7},
    "exclusive_number": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
    "only_minimum": {"type": "integer", "minimum": 50},
    "only_maximum": {"type": "integer", "maximum": -50},
    "even": {"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": 100},
    "sevens": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 10_000},
    "halves": {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 10},
    "free_integer": closed({"n": {"type": "integer"}}),
    "free_number": closed({"n": {"type": "number"}}),
    "percent": closed({"share": {"type": "number", "minimum": 0, "maximum": 100}}),
    "latitude": closed(
        {
            "lat": {"type": "number", "minimum": -90, "maximum": 90},
            "lon": {"type": "number", "minimum": -180, "maximum": 180},
        }
    ),
    "year": closed({"year": {"type": "integer", "minimum": 1900, "maximum": 2100}}),
}

ARRAYS: dict[str, Schema] = {
    **{f"integers_{a}_{b}": many(COUNT, a, b) for a, b in ((0, 0), (0, 3), (1, 1), (3, 3), (2, 5))},
    "words": many(SHORT, 1, 4),
    "flags": many(FLAG, 4, 4),
    "nulls": many({"type": "null"}, 1, 3),
    "nested": many(many(COUNT, 1, 2), 1, 2),
    "nested_three": many(many(many(FLAG, 1, 1), 1, 2), 1, 2),
    "tuple": {
        "type": "array",
        "prefixItems": [SHORT, COUNT, FLAG],
        "items": False,
        "minItems": 3,
    },
    "tuple_with_rest": {
        "type": "array",
        "prefixItems": [SHORT],
        "items": COUNT,
        "minItems": 1,
        "maxItems": 4,
    },
    "objects": many(closed({"id": COUNT}), 1, 3),
    "unions": many({"anyOf": [COUNT, SHORT, {"type": "null"}]}, 2, 4),
    "dates": many({"type": "string", "format": "date"}, 1, 3),
    "of_arrays_or_objects": many({"anyOf": [many(COUNT, 0, 2), closed({"k": FLAG})]}, 1, 3),
    "unbounded": {"type": "array", "items": {"enum": [0, 1]}},
}

UNIONS: dict[str, Schema] = {
    "text_or_number": {"anyOf": [SHORT, COUNT]},
    "nullable": {"type": ["string", "null"], "maxLength": 8},
    "three_types": {"type": ["integer", "boolean", "null"], "minimum": 0, "maximum": 99},
    "two_objects": {"anyOf": [closed({"a": COUNT}), closed({"b": SHORT})]},
    "objects_sharing_a_start": {
        "anyOf": [closed({"kind": {"const": "x"}, "n": COUNT}), closed({"kind": {"const": "y"}})]
    },
    "one_of_apart": {
        "oneOf": [
            closed({"type": {"const": "circle"}, "radius": COUNT}),
            closed({"type": {"const": "square"}, "side": COUNT}),
            closed({"type": {"const": "dot"}}),
        ]
    },
    "one_of_types": {
        "oneOf": [{"type": "boolean"}, {"type": "integer", "maximum": 9, "minimum": 0}]
    },
    "all_of_bounds": {
        "allOf": [{"type": "integer", "minimum": 10}, {"type": "integer", "maximum": 20}]
    },
    "all_of_objects": {
        "allOf": [
            {"type": "object", "properties": {"a": COUNT}, "required": ["a"]},
            {"type": "object", "properties": {"b": FLAG}, "required": ["b"]},
        ],
        "additionalProperties": False,
        "properties": {"a": True, "b": True},
    },
    "nested_any_of": {"anyOf": [{"anyOf": [{"const": 1}, {"const": 2}]}, {"const": "three"}]},
    "optional_union": closed({"v": {"anyOf": [many(COUNT, 0, 2), {"type": "null"}]}}),
    "result_or_error": {
        "anyOf": [
            closed({"result": {"anyOf": [COUNT, SHORT]}}),
            closed({"error": closed({"code": COUNT, "message": WORD})}),
        ]
    },
    "siblings": {"type": "object", "anyOf": [closed({"x": COUNT}), closed({"y": COUNT})]},
    "boolean_schema_inside": closed({"known": {"const": 1}, "flag": FLAG}),
    "enum_or_pattern": {
        "anyOf": [{"enum": ["n/a", "tbd"]}, {"type": "string", "pattern": "^v[0-9]$"}]
    },
}

TREE: Schema = {
    "$defs": {
        "node": closed(
            {
                "value": {"type": "integer", "minimum": 0, "maximum": 9},
                "children": many({"$ref": "#/$defs/node"}, 0, 2),
            },
            ("children",),
        )
    },
    "$ref": "#/$defs/node",
}
REFERENCES: dict[str, Schema] = {
    "tree": TREE,
    "list": {
        "$defs": {
            "cell": closed(
                {"head": FLAG, "tail": {"anyOf": [{"$ref": "#/$defs/cell"}, {"type": "null"}]}}
            )
        },
        "$ref": "#/$defs/cell",
    },
    "expression": {
        "$defs": {
            "expr": {
                "anyOf": [
                    {"type": "integer", "minimum": 0, "maximum": 99},
                    closed(
                        {
                            "op": {"enum": ["+", "-", "×"]},
                            "left": {"$ref": "#/$defs/expr"},
                            "right": {"$ref": "#/$defs/expr"},
                        }
                    ),
                ]
            }
        },
        "$ref": "#/$defs/expr",
    },
    "root": {
        "type": "object",
        "properties": {"name": SHORT, "parent": {"$ref": "#"}},
        "required": ["name"],
        "additionalProperties": False,
    },
    "mutual": {
        "$defs": {
            "a": closed({"b": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]}}),
            "b": closed({"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}),
        },
        "$ref": "#/$defs/a",
    },
    "shared": {
        "$defs": {"money": closed({"amount": COUNT, "currency": {"enum": ["€", "$", "¥"]}})},
        **closed({"net": {"$ref": "#/$defs/money"}, "gross": {"$ref": "#/$defs/money"}}),
    },
    "definitions": {
        "definitions": {"id": {"type": "integer", "minimum": 1, "maximum": 9}},
        "type": "array",
        "items": {"$ref": "#/definitions/id"},
        "minItems": 1,
        "maxItems": 3,
    },
    "by_path": {
        "type": "object",
        "properties": {
            "from": {"type": "string", "maxLength": 4},
            "to": {"$ref": "#/properties/from"},
        },
        "required": ["from", "to"],
        "additionalProperties": False,
    },
}

FORMATS: dict[str, Schema] = {
    name: {"type": "string", "format": name}
    for name in (
        "date",
        "time",
        "date-time",
        "duration",
        "uuid",
        "ipv4",
        "ipv6",
        "email",
        "hostname",
    )
}
FORMATS["event"] = closed(
    {"day": {"type": "string", "format": "date"}, "at": {"type": "string", "format": "time"}}
)
FORMAT_RULES = {
    "date": r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])",
    "time": r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([zZ]|[+-]([01]\d|2[0-3]):[0-5]\d)",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": r"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)(\.(?!$)|$)){4}",
    "email": r"[^@\s]+@[^@\s]+",
    "duration": r"P(?!$)(\d+[YMWD])*(T(\d+[HMS])+)?",
}

STRINGS: dict[str, Schema] = {
    **{
        f"length_{a}_{b}": {"type": "string", "minLength": a, "maxLength": b}
        for a, b in ((0, 0), (0, 1), (1, 1), (5, 5), (3, 20))
    },
    "phone": {"type": "string", "pattern": r"^\+[1-9][0-9]{6,12}$"},
    "hex_colour": {"type": "string", "pattern": "^#[0-9a-fA-F]{6}$"},
    "slug": {"type": "string", "pattern": "^[a-z]{2,5}(-[a-z]{2,5}){0,2}$"},
    "version": {"type": "string", "pattern": r"^\d{1,2}\.\d{1,2}\.\d{1,2}$"},
    "iban_like": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{2}( [0-9]{4}){2}$"},
    "alternatives": {"type": "string", "pattern": "^(north|south|east|west)$"},
    "unanchored": {"type": "string", "pattern": "[0-9]", "maxLength": 6},
    "pattern_and_length": {"type": "string", "pattern": "^a*b*$", "minLength": 3, "maxLength": 8},
    "letters_of_the_world": {"type": "string", "pattern": "^[äöüßéñçøλжש東京]{1,6}$"},
    "emoji_class": {"type": "string", "pattern": "^[😀-😏]{1,3}$"},
    "escaped_signs": {"type": "string", "pattern": r'^\[\]\(\)\{\}"\\$'},
}


def _composed() -> dict[str, Schema]:
    """The schemas above inside of others, where they meet commas, keys and other options."""
    inner = {
        "person": OBJECTS["person"], "emoji": ENUMS["emoji"], "cjk": ENUMS["cjk"],
        "mixed": ENUMS["mixed_types"], "quotes": ENUMS["quotes_and_slashes"],
        "small": NUMBERS["integer_-5_5"], "ratio": RATIO, "date": FORMATS["date"],
        "colour": STRINGS["hex_colour"], "tuple": ARRAYS["tuple"],
    }  # fmt: skip
    made: dict[str, Schema] = {}
    for name, schema in inner.items():
        made[f"many_{name}"] = many(schema, 1, 3)
        made[f"keyed_{name}"] = closed({"before": FLAG, "it": schema, "after": COUNT}, ("before",))
        made[f"maybe_{name}"] = {"anyOf": [{"type": "null"}, schema]}
    return made


def _json_cases() -> Iterator[GuidedCase]:
    groups = {
        "object": OBJECTS, "enum": ENUMS, "number": NUMBERS, "array": ARRAYS, "union": UNIONS,
        "reference": REFERENCES, "format": FORMATS, "string": STRINGS,
        "composed": _composed(),
    }  # fmt: skip
    for group, schemas in groups.items():
        for name, schema in schemas.items():
            yield GuidedCase(f"{group}/{name}", StructuredOutputs(json=schema), judge_of(schema))
    wide = closed({"a": COUNT, "b": many(COUNT, 2, 2)})
    for name, options in (
        ("compact", {"disable_any_whitespace": True}),
        ("own_whitespace", {"whitespace_pattern": r"[ \n]{1,2}"}),
        ("as_text", {}),
    ):
        wanted = StructuredOutputs(json=json.dumps(wide), **options)  # type: ignore[arg-type]
        yield GuidedCase(f"json/{name}", wanted, judge_of(wide))
    open_object: Schema = {"type": "object", "properties": {"a": COUNT}, "required": ["a"]}
    yield GuidedCase(
        "json/closed_by_option",
        StructuredOutputs(json=open_object, disable_additional_properties=True),
        judge_of(closed({"a": COUNT})),
    )
    yield GuidedCase("json/any", StructuredOutputs(json=True), judge_of({}))
    yield GuidedCase(
        "json/any_object", StructuredOutputs(json_object=True), judge_of({"type": "object"})
    )


def judge_of(schema: Schema) -> Judge:
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    rule = FORMAT_RULES.get(str(schema.get("format")))

    def judge(text: str) -> None:
        value = json.loads(text)
        validator.validate(value)
        assert rule is None or re.fullmatch(rule, value), f"{value!r} is no {schema['format']}"
        outside = re.sub(r'"(\\.|[^"\\])*"', '""', text)
        assert not re.search(r"\s{4}", outside), f"a run of whitespace in {text!r}"
        assert text == text.strip()

    return judge


# --- expressions, choices, grammars ---------------------------------------------------------

REGEXES = {
    "digits": r"[0-9]{1,8}",
    "anchored": r"^\d{3}-\d{4}$",
    "date": r"(19|20)\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])",
    "clock": r"([01]\d|2[0-3]):[0-5]\d",
    "yes_or_no": r"yes|no|maybe",
    "identifier": r"[A-Za-z_][A-Za-z0-9_]{0,10}",
    "roman": r"M{0,2}(CM|CD|D?C{0,3})(XC|XL|L?X{0,3})(IX|IV|V?I{1,3})",
    "ip": r"(\d{1,3}\.){3}\d{1,3}",
    "emoji": r"(🙂|🎉|👍🏽){1,3}",
    "greek": r"[α-ω]{2,6}",
    "quoted": r'"[^"\n]{0,12}"',
    "optional_sign": r"[+-]?[0-9]+(\.[0-9]{1,3})?",
    "words": r"([a-z]{1,6} ){1,3}[a-z]{1,6}\.",
    "slash": r"/[a-z]{1,5}/[a-z]{1,5}",
    "dollar": r"\$[0-9]{1,4}\.[0-9]{2}",
    "ends_in_a_dollar": r"[0-9]{1,3}\$",
    "backslashes": r"C:\\[a-z]{1,8}\\[a-z]{1,8}",
    "any_letter": r".{3,9}",
    "case_insensitive": r"(?i:hello|goodbye)",
    "groups": r"(?P<user>[a-z]{1,5})@(?:example|test)\.(com|org)",
    "newlines": r"([a-z]{1,5}\n){1,3}",
    "not_letters": r"[^a-zA-Z\n]{1,5}",
}

CHOICES: dict[str, list[str]] = {
    "sentiment": ["positive", "negative", "neutral"],
    "prefixes": ["a", "ab", "abc"],
    "emoji": ["👩‍👩‍👧‍👦", "🇯🇵", "e\u0301", "日本語"],
    "signs": [
        'with "quotes"',
        "with \\ backslash",
        "with\nnewline",
        "with / slash",
        "[a-z]+",
        "a|b",
    ],
    "spaces": [" leading", "trailing ", "in the middle"],
    "one": ["there is only this one thing to say"],
    "hundred": [f"option {i}" for i in range(100)],
}

ARITHMETIC = """
start: expr
expr: term (("+" | "-") term){0,2}
term: factor ("*" factor){0,1}
factor: NUMBER | "(" NUMBER ("+" | "-") NUMBER ")"
NUMBER: /[1-9][0-9]{0,2}/
"""
PARENTHESES = """
start: pair
pair: "(" pair{0,2} ")"
"""
COMMANDS = """
start: command ("; " command){0,2}
command: "go " DIRECTION | "take " THING | "wait " /[1-9]/ " turns"
DIRECTION: "north" | "south"
THING: "🔑" | "lamp" | "剣"
"""
ASSIGNMENT = """
start: NAME " = " value
value: NUMBER | TEXT | list
list: "[" [value ("," " " value){0,2}] "]"
NAME: /[a-z]{1,6}/
NUMBER: /[0-9]{1,3}/
TEXT: /"[a-z ]{0,8}"/
"""
TABLE = """
start: row{2,3}
row: CELL ("," CELL){2} "\\n"
CELL: /[a-z0-9]{1,5}/
"""
IN_WORDS = """
start: "Answer: " answer
answer: %json {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
  "additionalProperties": false, "x-guidance": {"whitespace_flexible": false}}
"""
GBNF = {
    "greeting": (
        'root ::= ("hello" | "hi") " " name\nname ::= [a-z]{1,6}\n',
        r"(hello|hi) [a-z]{1,6}",
    ),
    "number_list": (
        'root ::= "[" num ("," num)? "]"\nnum ::= [0-9] | [1-9] [0-9]\n',
        r"\[([0-9]|[1-9][0-9])(,([0-9]|[1-9][0-9]))?\]",
    ),
    "comments": ('# a comment\nroot ::= "yes" | "no" # either\n', r"yes|no"),
}
SELECT = """
start: "SELECT " COLUMN (", " COLUMN){0,2} " FROM " TABLE (" WHERE " COLUMN " = " NUMBER)?
COLUMN: "id" | "name" | "age"
TABLE: "users" | "orders"
NUMBER: /[0-9]{1,4}/
"""


def _is_balanced(text: str) -> None:
    depth = 0
    for sign in text:
        assert sign in "()"
        depth += 1 if sign == "(" else -1
        assert depth >= 0
    assert depth == 0


def _is_answer(text: str) -> None:
    assert text.startswith("Answer: ")
    assert list(json.loads(text.removeprefix("Answer: "))) == ["ok"]


def _is_table(text: str) -> None:
    rows = text.splitlines()
    assert 2 <= len(rows) <= 3
    assert all(re.fullmatch("[a-z0-9]{1,5}(,[a-z0-9]{1,5}){2}", row) for row in rows)


def matches(pattern: str) -> Judge:
    def judge(text: str) -> None:
        assert re.fullmatch(pattern, text), f"{text!r} does not match {pattern}"

    return judge


def _is_expression(text: str) -> None:
    ast.parse(text, mode="eval")


GRAMMARS: dict[str, tuple[str, Judge]] = {
    "arithmetic": (ARITHMETIC, _is_expression),
    "parentheses": (PARENTHESES, _is_balanced),
    "commands": (
        COMMANDS,
        matches(
            r"(?:(?:go (?:north|south)|take (?:🔑|lamp|剣)|wait [1-9] turns)(?:; (?!$)|$)){1,3}"
        ),
    ),
    "assignment": (ASSIGNMENT, lambda text: compile(text, "output", "exec") and None),
    "table": (TABLE, _is_table),
    "json_in_words": (IN_WORDS, _is_answer),
    "select": (
        SELECT,
        matches(
            r"SELECT (id|name|age)(, (id|name|age)){0,2} FROM (users|orders)"
            r"( WHERE (id|name|age) = \d{1,4})?"
        ),
    ),
}


def _other_cases() -> Iterator[GuidedCase]:
    for name, pattern in REGEXES.items():
        yield GuidedCase(f"regex/{name}", StructuredOutputs(regex=pattern), matches(pattern))
    for name, texts in CHOICES.items():
        exactly = matches("|".join(map(re.escape, texts)))
        yield GuidedCase(f"choice/{name}", StructuredOutputs(choice=texts), exactly)
    for name, (grammar, judge) in GRAMMARS.items():
        yield GuidedCase(f"lark/{name}", StructuredOutputs(grammar=grammar), judge)
    for name, (grammar, pattern) in GBNF.items():
        yield GuidedCase(f"gbnf/{name}", StructuredOutputs(grammar=grammar), matches(pattern))


def guided_cases() -> list[GuidedCase]:
    """All of them, in an order that mixes the groups."""
    cases = [*_json_cases(), *_other_cases()]
    return sorted(cases, key=lambda case: hash_of(case.name))


def hash_of(name: str) -> int:
    """The same in every process."""
    return sum(ord(letter) * 31**i for i, letter in enumerate(name)) % 1_000_003
