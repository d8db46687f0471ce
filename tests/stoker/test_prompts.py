"""The forms in which prompts and conversations may be given."""

import pytest

from scheduler.errors import InvalidRequest
from stoker.prompts import listed_chats, listed_prompts

CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("given", "listed"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        ({"prompt": "a"}, [{"prompt": "a"}]),
        ([{"prompt": "a"}, "b"], [{"prompt": "a"}, "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (("a", "b"), ["a", "b"]),
        ([], []),
        ([""], [""]),
        ([[]], [[]]),
    ],
)
def test_one_prompt_or_many(given: object, listed: list[object]) -> None:
    assert listed_prompts(given) == listed  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [None, 5, b"bytes", {1, 2}])
def test_what_is_no_prompt_is_refused(given: object) -> None:
    with pytest.raises(InvalidRequest, match="prompts must be"):
        listed_prompts(given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "listed"), [(CHAT, [CHAT]), ([CHAT, CHAT], [CHAT, CHAT]), ([], [[]])]
)
def test_one_conversation_or_many(given: object, listed: list[object]) -> None:
    assert listed_chats(given) == listed  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [None, "hi", {"role": "user", "content": "hi"}])
def test_what_is_no_conversation_is_refused(given: object) -> None:
    with pytest.raises(InvalidRequest, match="messages must be"):
        listed_chats(given)  # type: ignore[arg-type]
