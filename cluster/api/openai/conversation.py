"""The prompt of a chat: messages through the model's template, as token ids."""

from collections.abc import Mapping, Sequence

from cluster.api.openai.tools.shown import as_shown, has_calls, template_for_tools
from cluster.frontend.tokenizer import Tokenizer
from scheduler.errors import InvalidRequest

_ROLES = {"developer": "system"}
"""OpenAI's newer names, which templates do not know."""


def chat_ids(
    tokenizer: Tokenizer | None,
    messages: object,
    *,
    tools: Sequence[Mapping[str, object]] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    template_options: Mapping[str, object] | None = None,
) -> list[int]:
    """Token ids of a conversation. Args as those of `Tokenizer.encode_chat`.

    Raises:
        InvalidRequest: the messages are not what they should be, or the template refused them.
    """
    if tokenizer is None:
        raise InvalidRequest(
            "the engine's model has no tokenizer, so it has no chat template; send token ids to "
            "/v1/completions",
            param="messages",
        )
    known = with_known_roles(messages)
    if tools or has_calls(known):
        template = template_for_tools(tokenizer.files.chat_templates, has_tools=bool(tools))
        known, tools = as_shown(known, tools or (), template)
    return tokenizer.encode_chat(
        known,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=bool(continue_final_message),
        template_options=template_options,
    )


def with_known_roles(messages: object) -> Sequence[Mapping[str, object]]:
    """The messages, with a developer's as the system's. Other oddities are found later."""
    if not isinstance(messages, list):
        return messages  # type: ignore[return-value]  # refused where messages are checked
    return [_with_known_role(message) for message in messages]


def _with_known_role(message: object) -> Mapping[str, object]:
    role = message.get("role") if isinstance(message, dict) else None
    if isinstance(message, dict) and isinstance(role, str) and role in _ROLES:
        return {**message, "role": _ROLES[role]}
    return message  # type: ignore[return-value]  # refused where messages are checked


def num_chars(messages: object) -> int:
    """About how much text a conversation has."""
    if not isinstance(messages, list):
        return 0
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    return sum(_length(content) for content in contents)


def _length(content: object) -> int:
    if isinstance(content, str):
        return len(content)
    if not isinstance(content, list):
        return 0
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    return sum(len(text) for text in texts if isinstance(text, str))
