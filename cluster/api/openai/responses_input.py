"""The items of a `/v1/responses` call as chat messages."""

from collections.abc import Mapping, Sequence

from cluster.frontend.chat_messages import Json, Message, plain_json
from scheduler.errors import InvalidRequest

_TEXT_PARTS = ("input_text", "output_text", "text")
_ROLES = ("system", "developer", "user", "assistant")


def messages_of(items: object, instructions: str | None) -> list[Message]:
    """The conversation; instructions and a system message at its beginning are one.

    Calls that follow each other, and the assistant's text right before them, become one
    message, as they were said. Reasoning that a client sends back is left out.

    Raises:
        InvalidRequest: an item that is not what it should be, or not text.
    """
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, Sequence) or isinstance(items, bytes) or not items:
        kind = type(items).__name__ if items != [] else "an empty list"
        raise InvalidRequest(f"input must be a text or a list of items, got {kind}", param="input")
    messages: list[Message] = []
    for i, item in enumerate(items):
        _put(messages, item, f"input[{i}]")
    if not instructions:
        return messages
    if messages and messages[0]["role"] in ("system", "developer"):
        instructions = f"{instructions}\n\n{messages.pop(0)['content']}"
    return [{"role": "system", "content": instructions}, *messages]


def _put(messages: list[Message], item: object, where: str) -> None:
    if not isinstance(item, Mapping):
        raise InvalidRequest(f"{where} must be a map, got {type(item).__name__}", param=where)
    kind = item.get("type") or "message"
    match kind:
        case "message":
            messages.append(_message(item, where))
        case "function_call":
            _put_call(messages, item, where)
        case "function_call_output":
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": _text(item, "call_id", where),
                    "content": _content(item.get("output"), f"{where}.output"),
                }
            )
        case "reasoning":
            pass
        case "item_reference":
            raise InvalidRequest(
                f"{where} refers to a stored item, but nothing is stored; send the item",
                param=where,
            )
        case _:
            raise InvalidRequest(
                f"{where}.type must be message, function_call, function_call_output or reasoning, "
                f"got {kind!r:.80}",
                param=f"{where}.type",
            )


def _message(item: Mapping[str, object], where: str) -> Message:
    role = item.get("role")
    if role not in _ROLES:
        raise InvalidRequest(
            f"{where}.role must be one of {', '.join(_ROLES)}, got {role!r:.80}",
            param=f"{where}.role",
        )
    return {"role": str(role), "content": _content(item.get("content"), f"{where}.content")}


def _put_call(messages: list[Message], item: Mapping[str, object], where: str) -> None:
    call: Json = {
        "id": _text(item, "call_id", where),
        "type": "function",
        "function": {
            "name": _text(item, "name", where),
            "arguments": _text(item, "arguments", where),
        },
    }
    if messages and messages[-1]["role"] == "assistant":
        earlier = messages[-1].get("tool_calls", [])
        assert isinstance(earlier, list)
        messages[-1]["tool_calls"] = [*earlier, call]
    else:
        messages.append({"role": "assistant", "tool_calls": [call]})


def _text(item: Mapping[str, object], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(
            f"{where}.{name} must be a text, got {value!r:.80}", param=f"{where}.{name}"
        )
    return value


def _content(content: object, where: str) -> str:
    """Parts are joined as those of a chat message are."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidRequest(
            f"{where} must be a text or a list of parts, got {type(content).__name__}", param=where
        )
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: object, where: str) -> str:
    fields = plain_json(part, where)
    kind = fields.get("type") if isinstance(fields, dict) else None
    if isinstance(fields, dict) and kind in _TEXT_PARTS:
        return _text(fields, "text", where)
    if isinstance(fields, dict) and kind == "refusal":
        return _text(fields, "refusal", where)
    raise InvalidRequest(
        f"{where} must be a part of type input_text or output_text, got {kind or fields!r:.80}; "
        "this server takes text only",
        param=where,
    )
