"""Chat messages as callers give them, turned into plain data that a template may see.

Text content may be a string or a list of `{"type": "text", "text": ...}` parts; parts are
joined with a newline, because most templates expect one string. Fields that are None are
left out, since many templates print "None" for them.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias, Union

from scheduler.errors import InvalidRequest

Json: TypeAlias = Union[bool, int, float, str, list["Json"], dict[str, "Json"], None]  # noqa: UP007
Message: TypeAlias = dict[str, Json]

_DEEPEST = 64


def plain_messages(messages: Sequence[Mapping[str, object]]) -> list[Message]:
    """Check messages and copy them.

    Raises:
        InvalidRequest: none given, or one without a role, or with content that is not text.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        kind = type(messages).__name__
        raise InvalidRequest(f"messages must be a list of messages, got {kind}", param="messages")
    if not messages:
        raise InvalidRequest("messages is empty; give at least one message", param="messages")
    return [_plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _plain_message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping):
        kind = type(message).__name__
        raise InvalidRequest(
            f"{where} must be a map with role and content, got {kind}", param=where
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{where}.role must be a non-empty text, got {role!r}", param=where)
    plain: Message = {}
    for key, value in message.items():
        if value is None:
            continue
        place = f"{where}.{key}"
        plain[key] = _text(value, place) if key == "content" else plain_json(value, place)
    if "content" not in plain and "tool_calls" not in plain:
        raise InvalidRequest(f"{where} has neither content nor tool_calls", param=where)
    return plain


def _text(content: object, where: str) -> str:
    """Message content as one string."""
    if isinstance(content, str):
        return str(content)
    if not isinstance(content, list | tuple):
        kind = type(content).__name__
        raise InvalidRequest(f"{where} must be a text or a list of parts, got {kind}", param=where)
    texts: list[str] = []
    for i, part in enumerate(content):
        fields = part if isinstance(part, Mapping) else {}
        text = fields.get("text")
        if fields.get("type") != "text" or not isinstance(text, str):
            got = f"a part of type {fields['type']!r}" if "type" in fields else repr(part)[:80]
            raise InvalidRequest(
                f"{where}[{i}] must be {{'type': 'text', 'text': ...}}, got {got}; "
                "this server takes text only",
                param=where,
            )
        texts.append(text)
    return "\n".join(texts)


def plain_json(value: object, where: str, depth: int = 0) -> Json:
    """A copy made of exact JSON types: a template must not reach objects with methods.

    Raises:
        InvalidRequest: a value of another type, or nested more than 64 deep.
    """
    if depth > _DEEPEST:
        raise InvalidRequest(f"{where} is nested more than {_DEEPEST} deep", param=where)
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, list | tuple):
        return [plain_json(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {
            str(key): plain_json(item, f"{where}.{key}", depth + 1) for key, item in value.items()
        }
    raise InvalidRequest(
        f"{where} must be JSON (text, number, list, map), got {type(value).__name__}", param=where
    )
