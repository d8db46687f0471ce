"""The bodies that are sent."""

import json

import pytest

from stoker.bench.request_form import BadRequestForm, RequestForm
from stoker.bench.workload import Call

MINIMUM = {"model", "prompt", "max_tokens", "stream", "stream_options"}


def body(call: Call, endpoint: str = "completions", **fields: object) -> dict[str, object]:
    sent: dict[str, object] = json.loads(RequestForm(endpoint, "m", fields).sending(call).body)
    return sent


def test_nothing_is_sent_that_was_not_asked_for() -> None:
    sent = body(Call([1, 2], 8))

    assert sent == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert "max_tokens" not in body(Call("hi", None))


def test_what_the_user_set_is_sent_and_wins() -> None:
    sent = body(Call("hi", 8), temperature=0.5, max_tokens=3, stream_options={"x": 1})

    assert sent["temperature"] == 0.5
    assert sent["max_tokens"] == 3
    assert sent["stream_options"] == {"x": 1}
    assert sent.keys() == MINIMUM | {"temperature"}


def test_the_tokens_asked_for_are_those_of_the_body() -> None:
    def asked(**fields: object) -> int | None:
        return RequestForm("completions", "m", fields).sending(Call("hi", 8)).max_tokens

    assert asked() == 8
    assert asked(max_tokens=3) == 3


def test_prompts_take_the_form_of_their_route() -> None:
    chat = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}]

    assert body(Call("hi", 1), "chat")["messages"] == [{"role": "user", "content": "hi"}]
    assert body(Call(chat, 1), "chat")["messages"] == chat
    assert body(Call(chat, 1))["prompt"] == "be short\n\nhi"
    with pytest.raises(BadRequestForm, match="--endpoint completions"):
        body(Call([1, 2], 1), "chat")


@pytest.mark.parametrize(
    "fields", [{"stream": False}, {"n": 2}, {"best_of": 3}], ids=["stream", "n", "best_of"]
)
def test_fields_that_would_make_the_figures_wrong_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(BadRequestForm, match=next(iter(fields))):
        RequestForm("completions", "m", fields)


def test_a_body_is_shown_without_its_prompt() -> None:
    form = RequestForm("completions", "m", {"top_k": 5})

    shown = form.shown(Call([7] * 3000, 8))

    assert shown["prompt"] == "<3000 token ids>"
    assert shown.keys() == MINIMUM | {"top_k"}
