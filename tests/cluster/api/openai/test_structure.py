"""`response_format`, `structured_outputs` and `guided_*`, as far as the engine's door."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from openai import BadRequestError
from pydantic import BaseModel

from cluster.api.openai.structure_body import StructuredOutputsBody
from scheduler.structured import StructuredOutputs
from tests.cluster.api.openai.test_completions import last_request
from tests.cluster.api.rig import ApiRig

SCHEMA = {"type": "object", "properties": {"ключ": {"enum": ["🙂"]}}, "required": ["ключ"]}
HI = [{"role": "user", "content": "hi"}]


def grammar_after(rig: ApiRig, **fields: object) -> str:
    """The grammar that the engine is sent for a call with these fields."""
    answer = rig.http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3, **fields})
    assert answer.status_code == 200, answer.text
    request = last_request(rig)
    assert request.sampling.structured_outputs is None
    return request.sampling.grammar or ""


def refused(rig: ApiRig, **fields: object) -> dict[str, str]:
    answer = rig.http.post("/v1/chat/completions", json={"messages": HI, **fields})
    assert answer.status_code == 400, answer.text
    error: dict[str, str] = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


def test_every_way_to_say_a_schema_gives_the_same_grammar(rig: ApiRig) -> None:
    named = {"name": "x", "schema": SCHEMA, "strict": True}
    grammar = grammar_after(rig, structured_outputs={"json": SCHEMA})

    assert '"enum": ["🙂"]' in grammar
    assert grammar == grammar_after(rig, guided_json=SCHEMA)
    assert grammar == grammar_after(
        rig, response_format={"type": "json_schema", "json_schema": named}
    )


def test_every_kind_reaches_the_engine(rig: ApiRig) -> None:
    assert "[0-9]+" in grammar_after(rig, guided_regex="^[0-9]+$")
    assert '"yes" | "no"' in grammar_after(rig, guided_choice=["yes", "no"])
    assert grammar_after(rig, structured_outputs={"choice": ["a"]}) == grammar_after(
        rig, guided_choice=["a"]
    )
    assert "start: A" in grammar_after(rig, guided_grammar='start: A\nA: "a"')
    assert '"type": "object"' in grammar_after(rig, response_format={"type": "json_object"})
    assert grammar_after(rig, response_format={"type": "text"}) == ""
    assert grammar_after(rig, guided_json={}, guided_whitespace_pattern="[ ]") != grammar_after(
        rig, guided_json={}
    )


def test_the_official_client_sends_a_schema_from_a_class(rig: ApiRig) -> None:
    class Person(BaseModel):
        name: str
        age: int

    # The script's answer is no JSON.
    with pytest.raises(ValueError, match="json"):
        rig.openai().chat.completions.parse(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            response_format=Person,
        )

    grammar = last_request(rig).sampling.grammar
    assert grammar is not None
    assert '"additionalProperties": false' in grammar


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "a non-empty text"),
        ({"guided_choice": []}, "guided_choice", "at least one text"),
        ({"guided_json": {"uniqueItems": True}}, "guided_json", "uniqueItems"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_grammar": "start: b"}, "guided_grammar", "b"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "give one"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, None, "goes with guided_json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format",
            '"not"',
        ),
        ({"response_format": {"type": "grammar"}}, None, "response_format"),
        ({"response_format": {"type": "json_schema"}}, None, "json_schema"),
        ({"structured_outputs": {"structural_tag": "a"}}, None, "structural_tag"),
    ],
    ids=str,
)
def test_a_wrong_form_is_refused_by_the_name_that_the_caller_used(
    rig: ApiRig, fields: dict[str, object], param: str | None, said: str
) -> None:
    error = refused(rig, **fields)

    assert said in error["message"] or said in (error["param"] or "")
    if param is not None:
        assert error["param"] == param


def test_an_unclosed_bracket_is_refused_and_the_next_call_is_answered(rig: ApiRig) -> None:
    """Case 44."""
    with pytest.raises(BadRequestError, match="unclosed character class"):
        rig.openai().completions.create(
            model="tiny", prompt="hi", extra_body={"guided_regex": "[a-z"}
        )

    answer = rig.http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})
    assert answer.status_code == httpx.codes.OK


def test_bodies_know_every_field_of_a_form() -> None:
    fields = StructuredOutputsBody.model_fields.items()

    assert {f.alias or name for name, f in fields} == set(StructuredOutputs.__struct_fields__)


@pytest.mark.slow
def test_hostile_forms_hold_up_no_plain_call(rig: ApiRig) -> None:
    """Case 49: they wait for each other; the last thread that encodes is not theirs."""
    endless = {"prompt": "hi", "guided_json": {"type": "integer", "multipleOf": 99999989}}

    def ask() -> int:
        return rig.http.post("/v1/completions", json=endless).status_code

    with ThreadPoolExecutor(3) as threads:
        hostile = [threads.submit(ask) for _ in range(2)]
        plain = [
            rig.http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2}).status_code
            for _ in range(3)
        ]
        num_waiting = sum(not future.done() for future in hostile)
        refused = [future.result() for future in hostile]

    assert plain == [200] * 3
    assert num_waiting >= 1
    assert refused == [400] * 2
