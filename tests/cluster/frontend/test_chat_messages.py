from collections.abc import Mapping, Sequence

import pytest

from cluster.frontend.chat_messages import plain_json, plain_messages
from scheduler.errors import InvalidRequest


def test_text_parts_become_one_text_joined_with_newlines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]

    (message,) = plain_messages([{"role": "user", "content": parts}])

    assert message == {"role": "user", "content": "one\ntwo"}


def test_fields_that_are_none_are_left_out() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

    (message,) = plain_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])

    assert message == {"role": "assistant", "tool_calls": [call]}


def test_subclasses_with_methods_of_their_own_do_not_reach_the_template() -> None:
    class Shout(str):
        def strip(self, *_: object) -> str:
            return "LOUD"

    (message,) = plain_messages([{"role": "user", "content": Shout("x"), "name": Shout("y")}])

    assert type(message["content"]) is str
    assert type(message["name"]) is str


BAD: tuple[tuple[object, str], ...] = (
    ([], "empty"),
    ("hello", "list of messages"),
    ({"role": "user", "content": "x"}, "list of messages"),
    (["hello"], r"messages\[0\].*got str"),
    ([{"content": "x"}], "role"),
    ([{"role": "", "content": "x"}], "role"),
    ([{"role": 3, "content": "x"}], "role"),
    ([{"role": "user"}], "neither content nor tool_calls"),
    ([{"role": "user", "content": None}], "neither content nor tool_calls"),
    ([{"role": "user", "content": 5}], "got int"),
    ([{"role": "user", "content": ["x"]}], "got 'x'"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "image_url"),
    ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "text"),
    ([{"role": "user", "content": "x", "extra": object()}], "got object"),
)


@pytest.mark.parametrize(("messages", "reason"), BAD)
def test_messages_of_another_shape_are_refused_with_the_place(
    messages: Sequence[Mapping[str, object]], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        plain_messages(messages)
    assert (caught.value.param or "").startswith("messages")


def test_data_nested_too_deep_is_refused() -> None:
    value: object = "x"
    for _ in range(100):
        value = [value]
    with pytest.raises(InvalidRequest, match="64 deep"):
        plain_json(value, "tools")
