"""Tool calls and responses of the real model, forced by grammars, through the official client."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletion

from tests.cluster.api.openai.tools import templates
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


def named(name: str) -> dict[str, object]:
    return {"type": "function", "function": {"name": name}}


def ask_chats(
    sdk: openai.OpenAI, served: Serving, choices: Sequence[str], seeds: Sequence[int]
) -> list[tuple[str, ChatCompletion, ChatCompletion]]:
    """Each choice with each seed, whole and streamed, all at once."""

    def ask(case: tuple[str, int]) -> tuple[str, ChatCompletion, ChatCompletion]:
        choice, seed = case
        asked: dict[str, Any] = {
            "model": served.model,
            "messages": [{"role": "user", "content": QUESTION}],
            "tools": CHAT_TOOLS,
            "tool_choice": choice if choice == "required" else named(choice),
            "parallel_tool_calls": False,
            "temperature": 1.0,
            "seed": seed,
        }
        with sdk.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion()
        return choice, sdk.chat.completions.create(**asked), streamed

    with ThreadPoolExecutor(8) as threads:
        return list(threads.map(ask, product(choices, seeds)))


def check_chats(answers: list[tuple[str, ChatCompletion, ChatCompletion]]) -> None:
    assert answers
    for choice, whole, streamed in answers:
        calls = []
        for answer in (whole, streamed):
            (one,) = answer.choices
            assert one.finish_reason == "tool_calls"
            assert not one.message.content
            (call,) = one.message.tool_calls or []
            assert call.type == "function"
            assert choice in ("required", call.function.name)
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
            calls.append((call.function.name, call.function.arguments))
        assert calls[0] == calls[1]


def test_forced_calls_are_valid_and_the_same_streamed_or_not(
    sdk: openai.OpenAI, served: Serving
) -> None:
    check_chats(ask_chats(sdk, served, ["required", "set_alarm"], [0]))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_forced_calls_are_valid_whatever_the_seed(sdk: openai.OpenAI, served: Serving) -> None:
    check_chats(ask_chats(sdk, served, ["required", *SCHEMAS], range(1, 16)))


@pytest.mark.slow
def test_required_calls_may_be_several_and_each_is_valid(
    sdk: openai.OpenAI, served: Serving
) -> None:
    counts: list[int] = []
    for seed in range(6):
        answer = sdk.chat.completions.create(
            model=served.model,
            messages=[{"role": "user", "content": "The weather in Rome, Oslo and Bern, please."}],
            tools=CHAT_TOOLS,
            tool_choice="required",
            seed=seed,
            max_tokens=400,
        )
        (choice,) = answer.choices
        calls = choice.message.tool_calls or []
        whole = calls if choice.finish_reason == "tool_calls" else calls[:-1]
        for call in whole:
            assert call.type == "function"
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
        counts.append(len(calls))
    assert max(counts) > 1


def test_responses_agree_with_chats_and_with_their_streams(
    sdk: openai.OpenAI, served: Serving
) -> None:
    asked: dict[str, Any] = {
        "model": served.model,
        "input": QUESTION,
        "instructions": "Be brief.",
        "temperature": 0,
        "max_output_tokens": 12,
    }
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": QUESTION},
    ]
    whole = sdk.responses.create(**asked)
    with sdk.responses.create(**asked, stream=True) as stream:
        streamed = list(stream)[-1].response
    chat = sdk.chat.completions.create(
        model=served.model, messages=messages, temperature=0, max_tokens=12
    )
    assert whole.output_text == streamed.output_text == chat.choices[0].message.content
    assert whole.status == streamed.status == "incomplete"
    assert whole.usage is not None
    assert chat.usage is not None
    assert whole.usage.input_tokens == chat.usage.prompt_tokens
    assert whole.usage.output_tokens == chat.usage.completion_tokens == 12


@pytest.mark.slow
def test_calls_of_responses_are_valid_and_the_same_streamed_or_not(
    sdk: openai.OpenAI, served: Serving
) -> None:
    asked: dict[str, Any] = {
        "model": served.model,
        "input": QUESTION,
        "tools": TOOLS,
        "tool_choice": {"type": "function", "name": "set_alarm"},
        "temperature": 0,
    }
    with sdk.responses.stream(**asked) as stream:
        streamed = stream.get_final_response()
    whole = sdk.responses.create(**asked)
    calls = []
    for answer in (whole, streamed):
        assert answer.status == "completed"
        (call,) = answer.output
        assert call.type == "function_call"
        jsonschema.validate(json.loads(call.arguments), SCHEMAS["set_alarm"])
        calls.append((call.name, call.arguments))
    assert calls[0] == calls[1]


def test_a_schema_that_cannot_be_followed_is_refused_with_the_tools_as_its_field(
    sdk: openai.OpenAI, served: Serving
) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}}
    tool: Any = {"type": "function", "function": {"name": "odd", "parameters": odd}}
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(
            model=served.model,
            messages=[{"role": "user", "content": "Hi"}],
            tools=[tool],
            tool_choice="required",
        )
    assert caught.value.param == "tools"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["HERMES", "LLAMA3"])
def test_a_template_that_knows_tools_decides_how_calls_are_written(
    smollm2: Path, tmp_path: Path, family: str
) -> None:
    shown = [tool["function"] for tool in CHAT_TOOLS]
    template = tmp_path / "tools.jinja"
    template.write_text(getattr(templates, family), encoding="utf-8")
    with Serving(smollm2, f"--chat-template={template}") as serving, serving.wait_up().sdk() as sdk:
        check_chats(ask_chats(sdk, serving, ["required", *SCHEMAS], range(2)))
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        with serving.http() as http:
            body = {"messages": messages, "tools": CHAT_TOOLS, "return_token_strs": True}
            told = http.post("/tokenize", json=body).json()
        prompt = "".join(told["token_strs"])
        assert "set_alarm" in prompt
        assert "You may call one or more functions" not in prompt
        strict: list[Any] = [
            {"type": "function", "function": {**tool, "strict": True}} for tool in shown
        ]
        plain = sdk.chat.completions.create(
            model=serving.model, messages=messages, tools=strict, max_tokens=8, temperature=0
        )
        assert plain.usage is not None
        assert plain.usage.prompt_tokens == told["count"]
        assert plain.usage.completion_tokens == 8
