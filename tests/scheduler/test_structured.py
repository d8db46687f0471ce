"""The form of an output as a caller says it: one of five, well typed, of bounded size."""

import json
import re

import pytest

from scheduler.errors import InvalidRequest
from scheduler.structured import MAX_STRUCTURE_CHARS, StructuredOutputs

LOOP: list[object] = []
LOOP.append(LOOP)


def made(**fields: object) -> StructuredOutputs:
    return StructuredOutputs(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"json_object": False},
        {"json": None, "regex": None},
        {"json": {}, "regex": "a"},
        {"json_object": True, "choice": ["a"]},
        {"grammar": "start: A", "json": False},
    ],
)
def test_exactly_one_kind_must_be_given(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="exactly one of json, json_object") as refused:
        made(**fields)
    assert refused.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("json", 5),
        ("json", ["a"]),
        ("json", b"{}"),
        ("json", ""),
        ("json", {"enum": [object()]}),
        ("json", {"enum": [float("nan")]}),
        ("json", {"enum": LOOP}),
        ("json", {"enum": ["\ud800"]}),
        ("json", "[" * (MAX_STRUCTURE_CHARS + 1)),
        ("json_object", 1),
        ("json_object", "yes"),
        ("regex", 5),
        ("regex", ""),
        ("regex", "\udfff"),
        ("regex", "a" * (MAX_STRUCTURE_CHARS + 1)),
        ("choice", "yes"),
        ("choice", []),
        ("choice", [""]),
        ("choice", ["a", 5]),
        ("choice", ["a"] * 4097),
        ("choice", ["a" * MAX_STRUCTURE_CHARS, "b"]),
        ("grammar", {"a": 1}),
        ("grammar", ""),
    ],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", repr(value)),
)
def test_a_wrong_value_is_refused_and_named(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=name) as refused:
        made(**{name: value})
    assert refused.value.param == f"structured_outputs.{name}"
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("option", ["whitespace_pattern", "disable_any_whitespace"])
def test_options_of_json_are_refused_elsewhere(option: str) -> None:
    value = " ?" if option == "whitespace_pattern" else True

    made(json={}, **{option: value})
    made(json_object=True, **{option: value})
    with pytest.raises(InvalidRequest, match=f"{option} is about JSON"):
        made(regex="a", **{option: value})


def test_whitespace_is_either_described_or_forbidden() -> None:
    with pytest.raises(InvalidRequest, match="exclude each other"):
        made(json={}, whitespace_pattern=" ", disable_any_whitespace=True)


def test_a_schema_becomes_text_with_its_order_and_its_letters() -> None:
    schema = {"properties": {"ü": {"const": "🙂"}, "a": True}, "type": "object"}

    text = made(json=schema).json

    assert isinstance(text, str)
    assert json.loads(text) == schema
    assert list(json.loads(text)) == ["properties", "type"]
    assert "🙂" in text
    assert made(json=False).json == "false"
    assert made(json=False).kind == "json"


def test_choices_lose_what_they_repeat() -> None:
    assert made(choice=["b", "a", "b"]).choice == ("b", "a")
