"""Bodies with tools and items that no program would send: answered or refused, never a fault of
ours, and never without an answer."""

import json
import random

import pytest

from tests.cluster.api.openai.tools.parrot import ONE, TOOLS
from tests.cluster.api.rig import ApiRig

CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"a": 1}'}}
BODIES: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "x"},
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "y", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "z"}]},
            {"role": "user", "content": ONE},
        ],
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "time"}},
        "parallel_tool_calls": True,
        "max_tokens": 40,
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "z"},
            {"role": "user", "content": ONE},
        ],
        "instructions": "x",
        "tools": [{"type": "function", "name": "time", "parameters": {"type": "object"}}],
        "tool_choice": {"type": "function", "name": "time"},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        "include": ["message.output_text.logprobs"],
        "metadata": {"a": "b"},
        "max_output_tokens": 40,
    },
}
ODD: list[object] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        2**64,
        0.5,
        "",
        "a",
        "auto",
        "none",
        "required",
        "\ud800",
        "x" * 999,
    ),
    *(
        [],
        [[]],
        [None],
        [{}],
        {},
        {"a": 1},
        {"type": "object"},
        {"type": "function"},
        {"$ref": "#"},
    ),
]


def mutated(value: object, dice: random.Random) -> object:
    """The same with one value somewhere in it replaced or taken away."""
    if isinstance(value, dict | list) and value and dice.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = dice.choice(keys)
        if dice.random() < 0.1:
            kept = [each for each in keys if each != key]
            if isinstance(value, dict):
                return {each: value[each] for each in kept}
            return [value[each] for each in kept]
        changed = value.copy()
        changed[key] = mutated(value[key], dice)  # type: ignore[index,call-overload]
        return changed
    return dice.choice(ODD)


def hold(rig: ApiRig, path: str, seeds: range) -> set[int]:
    """The statuses of as many odd bodies."""
    statuses: set[int] = set()
    for seed in seeds:
        dice = random.Random(seed)
        body: object = {**BODIES[path], "stream": dice.random() < 0.3}
        if dice.random() < 0.5:
            del body["tool_choice"]  # type: ignore[attr-defined]  # forced calls are slower
        for _ in range(dice.randint(1, 2)):
            body = mutated(body, dice)
        told = rig.http.post(
            path, content=json.dumps(body), headers={"content-type": "application/json"}
        )
        statuses.add(told.status_code)
        assert told.status_code in (200, 400), f"{seed}: {body} → {told.text}"
        if told.status_code == 400:
            assert told.json()["error"]["message"]
        elif told.headers["content-type"].startswith("text/event-stream"):
            assert (
                "[DONE]" in told.text
                or "response.completed" in told.text
                or "incomplete" in told.text
            )
        else:
            assert told.json()["usage"]
    return statuses


@pytest.mark.parametrize("path", BODIES)
def test_odd_bodies_are_answered_or_refused(parrot_rig: ApiRig, path: str) -> None:
    assert hold(parrot_rig, path, range(60)) == {200, 400}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", BODIES)
def test_many_odd_bodies_are_answered_or_refused(parrot_rig: ApiRig, path: str) -> None:
    assert hold(parrot_rig, path, range(1000, 1600)) == {200, 400}
