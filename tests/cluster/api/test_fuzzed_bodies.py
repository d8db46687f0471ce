"""Whatever a body says, the answer is an answer or a refusal, and comes."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.api.openai.chat_body import ChatBody
from cluster.api.openai.completion_body import CompletionBody
from cluster.api.openai.unknown_fields import UNSUPPORTED
from tests.cluster.api.rig import ApiRig

JSON = {"Content-Type": "application/json"}
ODD = st.sampled_from(
    [
        None,
        True,
        0,
        -1,
        2**31,
        2**63,
        10**30,
        1e308,
        float("inf"),
        float("nan"),
        -0.0,
        "",
        "auto",
        "\ud800",
        "\x00",
        [],
        {},
        [[]],
        [None],
        ["a", 1],
        [2**31],
        {"": ""},
        {"type": "text"},
        {"type": "json_schema"},
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "\ud800", "content": "a"}],
    ]
)
VALUE = ODD | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
CHEAP = {"max_tokens": 2}


def bodies(fields: list[str]) -> st.SearchStrategy[dict[str, object]]:
    return st.dictionaries(st.sampled_from(fields), VALUE, max_size=4)


def check(rig: ApiRig, route: str, body: dict[str, object]) -> None:
    answer = rig.http.post(route, content=json.dumps(body), headers=JSON)
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    elif body.get("stream") is True:
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        assert answer.json()["choices"]
    assert rig.api.calls == {}


COMPLETION = bodies(sorted({*CompletionBody.model_fields, *UNSUPPORTED}))
CHAT = bodies(sorted({*ChatBody.model_fields, *UNSUPPORTED}))
FEW = settings(max_examples=60, suppress_health_check=list(HealthCheck))
MANY = settings(max_examples=500, suppress_health_check=list(HealthCheck))


def fuzz_completions(rig: ApiRig, body: dict[str, object]) -> None:
    check(rig, "/v1/completions", {"prompt": "hi", **CHEAP, **body})


def fuzz_chats(rig: ApiRig, body: dict[str, object]) -> None:
    messages = [{"role": "user", "content": "hi"}]
    check(rig, "/v1/chat/completions", {"messages": messages, **CHEAP, **body})


@FEW
@given(body=COMPLETION)
def test_no_body_of_a_completion_is_our_fault(rig: ApiRig, body: dict[str, object]) -> None:
    fuzz_completions(rig, body)


@FEW
@given(body=CHAT)
def test_no_body_of_a_chat_is_our_fault(rig: ApiRig, body: dict[str, object]) -> None:
    fuzz_chats(rig, body)


@pytest.mark.slow
@MANY
@given(body=COMPLETION)
def test_none_of_many_bodies_of_completions_is(rig: ApiRig, body: dict[str, object]) -> None:
    fuzz_completions(rig, body)


@pytest.mark.slow
@MANY
@given(body=CHAT)
def test_none_of_many_bodies_of_chats_is(rig: ApiRig, body: dict[str, object]) -> None:
    fuzz_chats(rig, body)
