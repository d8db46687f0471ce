"""`/v1/responses` read by the official client, from a model that repeats what it is told."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from cluster.messages.sockets import ToClient
from scheduler.request import Ended, Finish, Request
from tests.cluster.api.openai.tools.parrot import BROKEN, ONE, TWO, parrot
from tests.cluster.api.rig import ApiRig, spoken
from tests.cluster.frontend.fake_engine import tokens

TOOLS = [
    {"type": "function", "name": name, "parameters": {"type": "object"}, "strict": False}
    for name in ("weather", "time")
]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TEXTS = {
    "text": "Grüße 👋🏽 an alle!",
    "one call": ONE,
    "text and two calls": TWO,
    "text behind calls": f"{TWO}\nDone.",
    "no call": BROKEN,
}


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ApiRig, openai.OpenAI]]:
    with parrot(tmp_path_factory.mktemp("parrot")) as both:
        yield both


@pytest.fixture(scope="module")
def rig(talk: tuple[ApiRig, openai.OpenAI]) -> ApiRig:
    return talk[0]


@pytest.fixture(scope="module")
def sdk(talk: tuple[ApiRig, openai.OpenAI]) -> openai.OpenAI:
    return talk[1]


def events_of(rig: ApiRig, **body: object) -> list[dict[str, Any]]:
    """Every event of a stream, each valid by the client's own models in every field."""
    frames = rig.post("/v1/responses", stream=True, seed=1, **body).text.split("\n\n")
    assert frames.pop() == ""
    events: list[dict[str, Any]] = []
    for frame in frames:
        kind, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        EVENT.validate_python(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def said_by(items: list[Any]) -> list[tuple[str, ...]]:
    """What items say."""
    dumped = [item if isinstance(item, dict) else item.to_dict() for item in items]
    return [
        (item["type"], item["status"], item["name"], item["arguments"])
        if item["type"] == "function_call"
        else (item["type"], item["status"], *(part["text"] for part in item["content"]))
        for item in dumped
    ]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_streams_and_whole_answers_hold_the_same_items(
    rig: ApiRig, sdk: openai.OpenAI, text: str
) -> None:
    for per_step in (1, 5, 1000):
        asked = {"model": "tiny", "input": text, "tools": TOOLS, "extra_body": {"seed": per_step}}
        whole = sdk.responses.create(**asked)  # type: ignore[call-overload]
        with sdk.responses.stream(**asked) as stream:
            final = stream.get_final_response()

        Response.model_validate(whole.to_dict())
        assert whole.status == final.status == "completed"
        assert said_by(whole.output) == said_by(final.output)
        assert whole.usage == final.usage
        events = list(sdk.responses.create(**asked, stream=True))  # type: ignore[call-overload]
        assert said_by(events[-1].response.output) == said_by(whole.output)


def test_text_and_calls_become_items_in_the_order_of_the_text(sdk: openai.OpenAI) -> None:
    answer = sdk.responses.create(
        model="tiny",
        input=TEXTS["text behind calls"],
        tools=TOOLS,  # type: ignore[arg-type]
    )
    kinds = [item.type for item in answer.output]
    assert kinds == ["message", "function_call", "function_call", "message"]
    _, weather, time, _ = answer.output
    assert weather.type == time.type == "function_call"
    assert (weather.name, json.loads(weather.arguments)) == ("weather", {"city": "Köln 🌧"})
    assert (time.name, time.arguments) == ("time", "{}")
    assert weather.call_id != time.call_id
    assert answer.output_text == "Let me look.Done."


def test_events_come_in_the_order_of_the_protocol(rig: ApiRig) -> None:
    kinds = [event["type"] for event in events_of(rig, input=TWO, tools=TOOLS)]
    assert [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        *2
        * [
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
        ],
        "response.completed",
    ]


def test_deltas_put_together_are_what_is_said_at_the_end(rig: ApiRig) -> None:
    events = events_of(rig, input=TEXTS["text behind calls"], tools=TOOLS)
    items = events[-1]["response"]["output"]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == items
    assert [item["id"] for item in added] == [item["id"] for item in items]
    for index, item in enumerate(items):
        deltas = [
            event["delta"]
            for event in events
            if event["type"].endswith(".delta") and event["output_index"] == index
        ]
        said = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(deltas) == said


class City(BaseModel):
    name: str
    people: int


def test_the_client_parses_text_into_its_callers_own_classes(sdk: openai.OpenAI) -> None:
    said = City(name="Köln 🌧", people=1_000_000)
    asked: dict[str, Any] = {
        "model": "tiny",
        "input": said.model_dump_json(),
        "text_format": City,
    }
    assert sdk.responses.parse(**asked).output_parsed == said
    with sdk.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_parsed == said


def test_a_limit_makes_an_answer_incomplete(rig: ApiRig, sdk: openai.OpenAI) -> None:
    for text in (TEXTS["text"], ONE):
        for limit in (1, 12):
            answer = sdk.responses.create(
                model="tiny",
                input=text,
                max_output_tokens=limit,
                tools=TOOLS,  # type: ignore[arg-type]
            )
            assert answer.status == "incomplete"
            assert answer.incomplete_details is not None
            assert answer.incomplete_details.reason == "max_output_tokens"
            assert answer.output[-1].status == "incomplete"  # type: ignore[union-attr]
            assert answer.usage is not None
            assert answer.usage.output_tokens == limit
            events = events_of(rig, input=text, max_output_tokens=limit, tools=TOOLS)
            assert events[-1]["type"] == "response.incomplete"
            assert said_by(events[-1]["response"]["output"]) == said_by(answer.output)


def test_a_response_says_what_was_asked_and_what_it_took(sdk: openai.OpenAI) -> None:
    answer = sdk.responses.create(
        model="tiny",
        input="Hello",
        instructions="Be brief.",
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=100,
        metadata={"a": "b"},
        user="me",
        store=True,
        tools=TOOLS,  # type: ignore[arg-type]
        tool_choice="auto",
        parallel_tool_calls=False,
        text={"format": {"type": "text"}},
    )
    assert (answer.object, answer.id[:5], answer.model) == ("response", "resp_", "tiny")
    assert (answer.instructions, answer.temperature, answer.top_p) == ("Be brief.", 0.5, 0.9)
    assert (answer.max_output_tokens, answer.metadata, answer.user) == (100, {"a": "b"}, "me")
    assert answer.parallel_tool_calls is False
    assert [tool.name for tool in answer.tools] == ["weather", "time"]  # type: ignore[union-attr]
    assert answer.to_dict()["store"] is False
    usage = answer.usage
    assert usage is not None
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == 0


CALL = {
    "type": "function_call",
    "call_id": "c1",
    "name": "weather",
    "arguments": '{"city": "Rome"}',
}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "12 °C"}


def test_items_are_the_same_conversation_as_chat_messages(rig: ApiRig, sdk: openai.OpenAI) -> None:
    say = {"role": "user", "content": "say this"}
    earlier = sdk.responses.create(model="tiny", input="Good morning")
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Good morning"}]},
        *(item.to_dict() for item in earlier.output),
        {"role": "user", "content": "How is it?"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        CALL,
        RESULT,
        {"type": "message", **say},
    ]
    function = {"name": "weather", "arguments": CALL["arguments"]}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Good morning"},
        {"role": "assistant", "content": "Good morning"},
        {"role": "user", "content": "How is it?"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "12 °C"},
        say,
    ]
    answer = sdk.responses.create(model="tiny", input=items, instructions="Be brief.")  # type: ignore[arg-type]
    chat = rig.post("/v1/chat/completions", messages=messages).json()
    assert answer.output_text == chat["choices"][0]["message"]["content"] == "say this"
    assert answer.usage is not None
    assert answer.usage.input_tokens == chat["usage"]["prompt_tokens"]


def test_instructions_and_a_system_message_become_one(rig: ApiRig) -> None:
    items = [{"role": "developer", "content": "B"}, {"role": "user", "content": "x"}]
    messages = [{"role": "system", "content": "A\n\nB"}, {"role": "user", "content": "x"}]
    answer = rig.post("/v1/responses", input=items, instructions="A").json()
    chat = rig.post("/v1/chat/completions", messages=messages).json()
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_log_probabilities_come_with_the_text_if_included(rig: ApiRig, sdk: openai.OpenAI) -> None:
    asked = {
        "model": "tiny",
        "input": TEXTS["text"],
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    answer = sdk.responses.create(**asked)  # type: ignore[call-overload]
    Response.model_validate(answer.to_dict())
    (part,) = answer.output[0].content
    assert b"".join(bytes(entry.bytes) for entry in part.logprobs).decode() == TEXTS["text"]
    assert {len(entry.top_logprobs) for entry in part.logprobs} == {2}
    events = events_of(rig, **asked)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    streamed = [entry for delta in deltas for entry in delta["logprobs"]]
    assert [entry["bytes"] for entry in streamed] == [entry.bytes for entry in part.logprobs]


STORED = "nothing is"
WRONG: list[tuple[dict[str, object], str, str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", STORED),
    ({"conversation": "conv_1"}, "conversation", STORED),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", STORED),
    ({"background": True}, "background", "False"),
    ({"truncation": "auto"}, "truncation", "'disabled'"),
    ({"input": 5}, "input", "a text or a list of items, got int"),
    ({"input": []}, "input", "an empty list"),
    ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role", "'nobody'"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "nothing is stored"),
    ({"input": [{"type": "input_image"}]}, "input[0].type", "got 'input_image'"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0]", "text only"),
    ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments", "must be a text"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be"),
    ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
    ({"n": 2}, "n", "several calls"),
    ({"include": ["reasoning.encrypted_content"]}, "include", "message.output_text.logprobs"),
    ({"tool_choice": {"type": "function", "name": "rain"}}, "tool_choice", "no tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
    ({"text": {"format": {"type": "xml"}}}, "text.format", "xml"),
    ({"temperature": 3}, "temperature", "temperature must be"),
]


@pytest.mark.parametrize(
    ("fields", "param", "message"), WRONG, ids=[str(case[0]) for case in WRONG]
)
def test_what_cannot_be_served_is_refused_with_the_field_and_the_reason(
    sdk: openai.OpenAI, fields: dict[str, object], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.responses.create(model="tiny", input="x", extra_body=fields)
    assert message in caught.value.message
    assert param in (caught.value.param or "")


def test_a_stream_that_fails_ends_with_an_event_that_says_why(tmp_path: Path) -> None:
    def fail(request: Request) -> list[ToClient]:
        said = spoken(request, [300, 301], finish=Finish.NOT_YET)
        ended = (Ended(handle=request.handle, message="the last worker is gone"),)
        return [*said, tokens(request.handle, [], Finish.ERROR, ended=ended)]

    with ApiRig(tmp_path, script=fail) as rig, rig.openai() as sdk:
        with sdk.responses.create(model="tiny", input="hi", stream=True) as stream:
            events = list(stream)
        assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
        last = events[-1]
        assert last.type == "response.failed"
        assert last.response.status == "failed"
        assert last.response.error is not None
        assert last.response.error.message == "the last worker is gone"
        with pytest.raises(openai.InternalServerError, match="the last worker is gone"):
            sdk.responses.create(model="tiny", input="hi")
