"""The many forms in which callers give prompts, and one draft for each prompt."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeVar

import msgspec

from cluster.frontend.draft import Draft, Prompt, RequestOptions
from cluster.frontend.engine_client import EngineClient
from cluster.frontend.tokenizer import Tokenizer
from scheduler.errors import InvalidRequest
from scheduler.sampling import SamplingParams

Chat: TypeAlias = Sequence[Mapping[str, object]]
"""One conversation: maps with "role" and "content"."""

Item = TypeVar("Item")

_ENCODE_OPTIONS = (
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "parse_control_tokens",
    "template_options",
)


def prompt_drafts(
    engine: EngineClient,
    prompts: Prompt | Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    priority: int | Sequence[int],
    cache_salt: str | None,
    timeout_s: float | None,
) -> list[Draft]:
    """One draft for each prompt, in order.

    Raises:
        InvalidRequest: one of them cannot be served.
    """
    listed = listed_prompts(prompts)
    options = _options_for(len(listed), priority, cache_salt, timeout_s)
    samplings = _one_for_each("sampling_params", sampling, len(listed))
    if sampling is None and listed:
        samplings = [engine.default_sampling()] * len(listed)
    each = zip(listed, samplings, options, strict=True)
    return [engine.draft(prompt, one, option) for prompt, one, option in each]


def chat_drafts(
    engine: EngineClient,
    messages: Chat | Sequence[Chat],
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    priority: int | Sequence[int],
    cache_salt: str | None,
    timeout_s: float | None,
    template: Mapping[str, object] | None,
) -> list[Draft]:
    """One draft for each conversation, in order.

    Raises:
        InvalidRequest: one of them cannot be served.
    """
    listed = listed_chats(messages)
    options = _options_for(len(listed), priority, cache_salt, timeout_s)
    samplings = _one_for_each("sampling_params", sampling, len(listed))
    each = zip(listed, samplings, options, strict=True)
    return [chat_draft(engine, chat, one, option, template) for chat, one, option in each]


def chat_draft(
    engine: EngineClient,
    messages: Chat,
    sampling: SamplingParams | None,
    options: RequestOptions,
    template: Mapping[str, object] | None,
) -> Draft:
    """A conversation as a draft. Without sampling, its answer may fill the context."""
    tokenizer = engine.tokenizer()
    if tokenizer is None:
        raise InvalidRequest(
            "the engine's model has no tokenizer, so it has no chat template; send token ids",
            param="messages",
        )
    if sampling is None:
        sampling = msgspec.structs.replace(engine.default_sampling(), max_tokens=None)
    ids, text = _encoded(tokenizer, messages, dict(template or {}))
    return engine.draft(ids, sampling, options, prompt_text=text)


def _encoded(
    tokenizer: Tokenizer, messages: Chat, options: dict[str, object]
) -> tuple[list[int], str]:
    unknown = sorted(options.keys() - set(_ENCODE_OPTIONS))
    if unknown:
        raise InvalidRequest(
            f"template has no option {unknown[0]!r}; there are {', '.join(_ENCODE_OPTIONS)}",
            param="template",
        )
    try:
        ids = tokenizer.encode_chat(messages, **options)  # type: ignore[arg-type]  # checked there
        options.pop("parse_control_tokens", None)
        text = tokenizer.render_chat(messages, **options)  # type: ignore[arg-type]
    except TypeError as error:
        raise InvalidRequest(f"wrong template option: {error}", param="template") from error
    return ids, text


def listed_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt alone counts as a list of one; a list of integers is one prompt of ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        kind = type(prompts).__name__
        raise InvalidRequest(
            f"prompts must be a text, token ids, or a list of such, got {kind}", param="prompts"
        )
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]  # by the line above
    return list(prompts)  # type: ignore[arg-type]


def listed_chats(messages: Chat | Sequence[Chat]) -> list[Chat]:
    """One conversation alone counts as a list of one."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        kind = type(messages).__name__
        raise InvalidRequest(
            f"messages must be a conversation or a list of such, got {kind}", param="messages"
        )
    if messages and all(isinstance(item, list | tuple) for item in messages):
        return list(messages)  # type: ignore[arg-type]
    return [messages]  # type: ignore[list-item]


def _options_for(
    count: int, priority: int | Sequence[int], cache_salt: str | None, timeout_s: float | None
) -> list[RequestOptions]:
    priorities = _one_for_each("priority", priority, count)
    return [
        RequestOptions(priority=one, cache_salt=cache_salt, timeout_s=timeout_s)
        for one in priorities
    ]


def _one_for_each(name: str, given: "Item | Sequence[Item]", count: int) -> "list[Item]":
    """The value for each of `count` prompts, from one for all or a list of as many."""
    if not isinstance(given, list | tuple):
        return [given] * count  # type: ignore[list-item]  # values themselves are no sequences
    if len(given) != count:
        raise InvalidRequest(
            f"{name} has {len(given)} entries for {count} prompts; give one for all, or one "
            "for each",
            param=name,
        )
    return list(given)
