"""Tool calls over `/v1/chat/completions`, read by the official client, from scripted answers."""

from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.cluster.api.openai.tools.parrot import BROKEN, ONE, TOOLS, TWO, ask, parrot, streamed
from tests.cluster.api.rig import ApiRig


@pytest.mark.parametrize("per_step", [1, 7, 1000])
@pytest.mark.parametrize("text", [ONE, TWO, BROKEN, "Hello <b>", TWO + "\nThat is all."])
def test_streams_and_whole_answers_hold_the_same_calls(
    sdk: openai.OpenAI, text: str, per_step: int
) -> None:
    for n in (1, 2):
        whole, stream = (
            call(sdk, text, n=n, seed=per_step)  # type: ignore[operator]
            for call in (ask, streamed)
        )
        assert len(whole.choices) == len(stream.choices) == n
        for one, other in zip(whole.choices, stream.choices, strict=True):
            assert one.finish_reason == other.finish_reason
            assert (one.message.content or "") == (other.message.content or "")
            calls, others = one.message.tool_calls or [], other.message.tool_calls or []
            assert [(call.function.name, call.function.arguments) for call in calls] == [
                (call.function.name, call.function.arguments) for call in others
            ]
            ids = [call.id for call in (*calls, *others)]
            assert len(set(ids)) == len(ids), "each call has an id of its own"
            assert all(call_id.startswith("call_") for call_id in ids)


def test_calls_come_with_names_arguments_and_the_reason(sdk: openai.OpenAI) -> None:
    (choice,) = ask(sdk, TWO).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    assert [call.function.model_dump() for call in choice.message.tool_calls or []] == [
        {"name": "weather", "arguments": '{"city": "Köln 🌧"}'},
        {"name": "time", "arguments": "{}"},
    ]


def test_an_answer_that_is_calls_alone_has_no_content(parrot_rig: ApiRig) -> None:
    answer = parrot_rig.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": ONE}], tools=TOOLS
    )
    assert answer.json()["choices"][0]["message"]["content"] is None


def test_in_a_stream_index_id_and_name_come_once_and_arguments_in_pieces(
    sdk: openai.OpenAI,
) -> None:
    chunks = list(ask(sdk, TWO, stream=True))
    deltas = [
        call
        for chunk in chunks
        for choice in chunk.choices  # type: ignore[attr-defined]
        for call in choice.delta.tool_calls or []
    ]
    firsts = [call for call in deltas if call.id is not None]
    assert [(call.index, call.type, call.function.name) for call in firsts] == [
        (0, "function", "weather"),
        (1, "function", "time"),
    ]
    rest = [call for call in deltas if call.id is None]
    assert all(call.function.name is None and call.function.arguments for call in rest)
    pieces = [call.function.arguments for call in deltas if call.index == 0]
    assert "".join(pieces) == '{"city": "Köln 🌧"}'


class weather(BaseModel):
    city: str


def test_the_client_parses_arguments_into_its_callers_own_classes(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": ONE}],
        "tools": [openai.pydantic_function_tool(weather)],
    }
    whole = sdk.chat.completions.parse(**asked)
    with sdk.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion()
    for answer in (whole, streamed):
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.function.parsed_arguments == weather(city="Köln 🌧")


def test_what_only_looks_like_a_call_is_content(sdk: openai.OpenAI) -> None:
    (choice,) = ask(sdk, BROKEN).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", BROKEN)
    assert choice.message.tool_calls is None


def test_a_call_that_max_tokens_cuts_ends_cleanly(parrot_rig: ApiRig, sdk: openai.OpenAI) -> None:
    length = len(parrot_rig.tokenizer.encode(ONE, add_special_tokens=False))
    seen: set[str] = set()
    for max_tokens in range(1, length + 2, 3):
        (whole,) = ask(sdk, ONE, max_tokens=max_tokens).choices
        (stream,) = list(ask(sdk, ONE, max_tokens=max_tokens, stream=True))[-1].choices  # type: ignore[attr-defined]
        assert whole.finish_reason == stream.finish_reason
        assert whole.finish_reason == ("length" if max_tokens <= length else "tool_calls")
        calls = whole.message.tool_calls or []
        assert bool(calls) != bool(whole.message.content)
        seen |= {call.function.arguments for call in calls}
    assert '{"city": "Köln 🌧"}' in seen
    assert len(seen) > 3, "cut in the middle too"


def test_without_parallel_calls_the_first_is_the_only_one(sdk: openai.OpenAI) -> None:
    (choice,) = ask(sdk, TWO, parallel_tool_calls=False).choices
    assert [call.function.name for call in choice.message.tool_calls or []] == ["weather"]


def test_with_the_choice_none_calls_are_text_and_tools_are_not_shown(sdk: openai.OpenAI) -> None:
    answer = ask(sdk, ONE, tool_choice="none")
    assert answer.choices[0].message.content == ONE
    assert answer.choices[0].message.tool_calls is None
    bare = ask(sdk, ONE, tools=openai.omit)
    assert answer.usage is not None
    assert answer.usage == bare.usage
    assert answer.usage.prompt_tokens < (ask(sdk, ONE).usage or answer.usage).prompt_tokens


def test_tokenize_counts_tools_and_calls_as_a_chat_does(
    parrot_rig: ApiRig, sdk: openai.OpenAI
) -> None:
    first = ask(sdk, ONE)
    messages = [
        {"role": "user", "content": ONE},
        first.choices[0].message.to_dict(),
        {"role": "tool", "tool_call_id": "x", "content": "12 °C"},
        {"role": "user", "content": "And?"},
    ]
    answer = ask(sdk, "", messages=messages)
    told = parrot_rig.post(
        "/tokenize", messages=messages, tools=TOOLS, add_generation_prompt=True
    ).json()
    assert answer.usage is not None
    assert told["count"] == answer.usage.prompt_tokens


def test_llama3_calls_are_read_where_the_setting_says_so(
    sdk: openai.OpenAI, tmp_path: Path
) -> None:
    text = '{"name": "weather", "parameters": {"city": "Rome"}}'
    assert ask(sdk, text).choices[0].message.content == text
    with parrot(tmp_path, tool_parser="llama3") as (_, llama):
        (choice,) = ask(llama, text).choices
        assert [call.function.arguments for call in choice.message.tool_calls or []] == [
            '{"city": "Rome"}'
        ]


def test_a_server_that_reads_no_calls_says_so(tmp_path: Path) -> None:
    with parrot(tmp_path, tool_parser="none") as (_, silent):
        with pytest.raises(openai.BadRequestError, match="tool_parser=none"):
            ask(silent, ONE)
        assert ask(silent, "x", tool_choice="none").choices[0].message.content == "x"


NAMED = {"type": "function", "function": {"name": "rain"}}
WRONG: list[tuple[dict[str, object], str, str]] = [
    ({"tools": None, "tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"tool_choice": NAMED}, "tool_choice", "names the function 'rain'; tools has weather, time"),
    ({"tool_choice": "any"}, "tool_choice", "'none', 'auto' or 'required'"),
    ({"tools": [*TOOLS, TOOLS[0]]}, "tools", "two functions named 'weather'"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name", "a b"),
    ({"tools": TOOLS[:1] * 129}, "tools", "128"),
    ({"tools": "weather"}, "tools", "list"),
]


@pytest.mark.parametrize(("fields", "param", "message"), WRONG, ids=[case[2] for case in WRONG])
def test_wrong_tools_are_refused_with_the_field_and_the_reason(
    sdk: openai.OpenAI, fields: dict[str, object], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(sdk, "x", **fields)
    assert message in caught.value.message
    assert param in (caught.value.param or "")
