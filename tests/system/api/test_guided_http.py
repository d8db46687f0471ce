"""Structured outputs through the official client, and hostile ones beside a stream."""

import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.system.api.serving import Serving

pytestmark = pytest.mark.model

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Zürich", "東京", "São Paulo 🌆"]},
        "visits": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "visits"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
ASKED: list[Any] = [{"role": "user", "content": "Describe a city as JSON."}]
LIMIT_S = 30.0
"""The limit is 3 s; the process may have to be started again first, on a busy machine."""
NUM_BEFORE = 40
HOSTILE: dict[str, dict[str, object]] = {
    "endless": {"guided_json": {"type": "integer", "multipleOf": 99999989}},
    "bounds": {"guided_regex": "(((((a{1,100}){1,100}){1,100}){1,100}){1,100}){1,100}"},
    "deep_references": {
        "guided_grammar": "start: r0\n"
        + "\n".join(f'r{i}: "x{i}" r{(i + 1) % 4000}?' for i in range(4000))
    },
    "long": {"guided_regex": "a" * 200_000},
    "many_properties": {
        "guided_json": {"properties": {f"p{i}": {"type": "string"} for i in range(5000)}}
    },
    "patterns": {
        "guided_json": {
            "type": "object",
            "patternProperties": {f"^a{i}[a-z]*$": {} for i in range(300)},
        }
    },
}


@pytest.fixture
def sdk(served: Serving, http: httpx.Client) -> Iterator[openai.OpenAI]:
    """Tests also take `http`, which looks that nothing is left in the engine."""
    with served.sdk() as client:
        yield client


class City(BaseModel):
    size: Literal["small", "groß"]
    is_old: bool


def test_streams_and_whole_answers_keep_to_a_schema_alike(
    sdk: openai.OpenAI, served: Serving
) -> None:
    asked: dict[str, Any] = {
        "model": served.model,
        "messages": ASKED,
        "response_format": FORMAT,
        "max_tokens": 40,
        "temperature": 1.0,
        "seed": 3,
        "n": 2,
    }
    whole = sdk.chat.completions.create(**asked)
    pieces = {0: "", 1: ""}
    ends = {}
    for chunk in sdk.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends.get(choice.index)

    for choice in whole.choices:
        assert choice.message.content == pieces[choice.index]
        assert choice.finish_reason == ends[choice.index] == "stop"
        jsonschema.validate(json.loads(pieces[choice.index]), SCHEMA)
        assert "\\u" not in pieces[choice.index]


def test_the_client_makes_objects_of_a_class(sdk: openai.OpenAI, served: Serving) -> None:
    answer = sdk.chat.completions.parse(
        model=served.model,
        messages=ASKED,
        response_format=City,
        temperature=0,
        max_tokens=40,
    )

    (choice,) = answer.choices
    assert isinstance(choice.message.parsed, City)
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"guided_choice": ["👍", "👎🏽"]}, "👍|👎🏽"),
        ({"guided_regex": "[0-9]{3}-[0-9]{4}"}, "[0-9]{3}-[0-9]{4}"),
        ({"guided_grammar": 'root ::= "ja" | "nein" "!"\n'}, "ja|nein!"),
        ({"structured_outputs": {"json": {"enum": ["東京"]}}}, '"東京"'),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_completion_keeps_to_a_form(
    sdk: openai.OpenAI, served: Serving, form: dict[str, object], pattern: str
) -> None:
    answer = sdk.completions.create(
        model=served.model, prompt="Well,", extra_body=form, max_tokens=30, logprobs=1
    )

    (choice,) = answer.choices
    assert re.fullmatch(pattern, choice.text)
    assert choice.finish_reason == "stop"


def test_a_document_that_is_cut_says_so(sdk: openai.OpenAI, served: Serving) -> None:
    """Case 47."""
    answer = sdk.chat.completions.create(
        model=served.model, messages=ASKED, response_format=FORMAT, max_tokens=5
    )

    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert (choice.message.content or "").startswith("{")


def test_a_form_that_bans_leave_nothing_ends_with_an_error(
    sdk: openai.OpenAI, served: Serving
) -> None:
    """Case 46. The next call is answered."""
    with pytest.raises(openai.APIStatusError, match="leave no token that the grammar allows"):
        sdk.with_options(max_retries=0).completions.create(
            model=served.model,
            prompt="Well,",
            extra_body={"guided_choice": ["yes"], "allowed_token_ids": [500]},
        )

    assert sdk.completions.create(model=served.model, prompt="Well,", max_tokens=2).choices


@pytest.mark.slow
def test_hostile_forms_are_refused_in_time_while_a_stream_flows(
    served: Serving, http: httpx.Client
) -> None:
    """Case 49. The stream stops for less than a second; each bad call ends within its limits."""
    gaps: list[float] = []
    is_over = threading.Event()

    def stream() -> None:
        body = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with served.http() as client, client.stream("POST", "/v1/completions", json=body) as answer:
            before = None
            for line in answer.iter_lines():
                if line:
                    now = time.monotonic()
                    gaps.append(now - (before or now))
                    before = now
                if is_over.is_set():
                    return

    reader = threading.Thread(target=stream)
    reader.start()
    while len(gaps) < NUM_BEFORE:
        time.sleep(0.01)
    try:
        for name, form in HOSTILE.items():
            begin = time.monotonic()
            answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **form})
            taken = time.monotonic() - begin
            assert answer.status_code == 400, name
            assert taken < LIMIT_S, f"{name} took {taken:.1f} s"
            assert answer.json()["error"]["param"] == next(iter(form))
    finally:
        is_over.set()
        reader.join()

    before, during = gaps[:NUM_BEFORE], gaps[NUM_BEFORE:]
    assert len(during) > 10
    # Where others compute too, a stream stops for longer also without us.
    limit_s = max(1.0, 4 * max(before))
    assert max(during) < limit_s, f"{sorted(during)[-5:]} of {len(during)}"
