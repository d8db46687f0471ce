"""Tool calls and responses of the real model, forced by grammars, through the official client."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tests.system.api.serving import Serving

pytestmark = pytest.mark.model

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "unit": {"enum": ["celsius", "fahrenheit", "🌡"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "set_alarm": {
        "type": "object",
        "properties": {
            "at": {"$ref": "#/$defs/time"},
            "days": {"type": "array", "items": {"enum": ["mon", "tue"]}, "maxItems": 2},
        },
        "required": ["at"],
        "additionalProperties": False,
        "$defs": {
            "time": {
                "type": "object",
                "properties": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}},
                "required": ["hour"],
                "additionalProperties": False,
            }
        },
    },
}
CHAT_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": schema, "strict": True}
    for name, schema in SCHEMAS.items()
]
QUESTION = "What is the weather in Paris today?"


@pytest.fixture
def sdk(served: Serving, http: httpx.Client) -> Iterator[openai.OpenAI]:
    """Beside `http`, which looks whether anything is left."""
    with served.sdk() as sdk:
        yield sdk


def is_valid(name: str, arguments: str) -> bool:
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    return True


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize("choice", ["required", *SCHEMAS])
def test_forced_calls_are_valid_and_the_same_streamed_or_not(
    sdk: openai.OpenAI, served: Serving, choice: str
) -> None:
    for seed in range(3):
        asked: dict[str, Any] = {
            "model": served.model,
            "messages": [{"role": "user", "content": QUESTION}],
            "tools": CHAT_TOOLS,
            "tool_choice": choice if choice == "required" else named(choice),
            "parallel_tool_calls": False,
            "temperature": 1.0,
            "seed": seed,
            "max_tokens": 200,
        }
        whole = sdk.chat.completions.create(**asked)
        with sdk.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion()

        for answer in (whole, streamed):
            (one,) = answer.choices
            assert one.finish_reason == "tool_calls"
            assert not one.message.content
            (call,) = one.message.tool_calls or []
            assert choice in ("required", call.function.name)
            assert is_valid(call.function.name, call.function.arguments)
        first, second = (answer.choices[0].message.tool_calls[0] for answer in (whole, streamed))  # type: ignore[index]
        assert first.function.arguments == second.function.arguments
