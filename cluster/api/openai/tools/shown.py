"""Showing tools, earlier calls and their results to a model through its chat template."""

import json
import re
from collections.abc import Mapping, Sequence

from cluster.api.openai.tools.formats import HERMES
from cluster.frontend.chat_messages import Json, Message, plain_messages

_PREAMBLE = """# Tools

You may call one or more functions to assist with the user query.

You are given the signatures of the functions within <tools></tools> tags:
<tools>
{signatures}
</tools>

For each function call, answer with an object of the function's name and arguments within
<tool_call></tool_call> tags:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-object>}}
</tool_call>"""


_TOOLS_IN_TEMPLATE = re.compile(r"\{[{%][^{}]*\btools\b")


def template_for_tools(templates: Mapping[str, str], *, has_tools: bool = True) -> str:
    """The source of the chat template that `Tokenizer` renders with."""
    return (has_tools and templates.get("tool_use")) or templates.get("default", "")


def has_calls(messages: object) -> bool:
    """Whether a conversation holds calls or their results."""
    if not isinstance(messages, list):
        return False
    return any(
        isinstance(message, dict) and (message.get("tool_calls") or message.get("role") == "tool")
        for message in messages
    )


def knows_tools(template: str) -> bool:
    """Whether a template looks at the tools that it is given."""
    return _TOOLS_IN_TEMPLATE.search(template) is not None


def as_shown(
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, object]],
    template: str,
) -> tuple[list[Message], Sequence[Mapping[str, object]] | None]:
    """Messages and tools to render with a template: as they are if it knows tools, or else
    everything about tools written into the messages."""
    unpacked = with_unpacked_arguments(messages)
    if knows_tools(template):
        return unpacked, tools or None
    return as_plain_turns(unpacked, tools), None


def with_unpacked_arguments(messages: Sequence[Mapping[str, object]]) -> list[Message]:
    """The messages with the arguments of earlier calls as maps.

    Clients send them as they got them, as a text of JSON; templates print them with
    `tojson`, which would quote a text once more. What is no JSON object stays a text.
    """
    return [_unpacked(message) for message in plain_messages(messages)]


def as_plain_turns(
    messages: Sequence[Message], tools: Sequence[Mapping[str, object]]
) -> list[Message]:
    """The same conversation for a template that knows no tools.

    Such a template prints roles and contents and nothing else. So tools become a part of
    the system message, calls a part of the assistant's, and results turns of the user, in
    the wording of Hermes and Qwen.
    """
    turns = [_plain_turn(message) for message in messages]
    if not tools:
        return turns
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    preamble = _PREAMBLE.format(signatures=signatures)
    if turns[0]["role"] in ("system", "developer"):
        return [{**turns[0], "content": f"{turns[0]['content']}\n\n{preamble}"}, *turns[1:]]
    return [{"role": "system", "content": preamble}, *turns]


def _unpacked(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_unpacked_call(call) for call in calls]}


def _unpacked_call(call: Json) -> Json:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = call["function"]
    assert isinstance(function, dict)
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    if not isinstance(value, dict):
        return call
    return {**call, "function": {**function, "arguments": value}}


def _plain_turn(message: Message) -> Message:
    content = message.get("content", "")
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    written = [content] if content else []
    written += [_written(call) for call in calls]
    return {"role": message["role"], "content": "\n".join(map(str, written))}


def _written(call: Json) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    function = function if isinstance(function, dict) else {}
    said = {"name": function.get("name"), "arguments": function.get("arguments")}
    text = json.dumps(said, ensure_ascii=False)
    return f"{HERMES.opening}\n{text}\n{HERMES.closing}"
