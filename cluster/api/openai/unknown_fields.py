"""Fields of a body that this server does not read: who may send them, and who is refused.

Three kinds. Fields that cannot change an answer are accepted in silence. Fields that other
servers read, and that would change it, are refused unless they say what happens anyway.
All others are unknown, most likely misspelt: the setting `unknown_fields` decides.
"""

import difflib
import re
from collections.abc import Iterable, Mapping

from pydantic import BaseModel

from cluster.api.errors import bad_request
from cluster.api.openai.generation_body import StreamOptions

ACCEPTED = frozenset(
    {
        "guided_decoding_backend",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
    }
)
"""Hints and labels."""

UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "kv_transfer_params": ({},),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "reasoning_effort": (),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""With the values that ask for nothing, beside null."""

_INSTEAD = {
    "best_of": "it is for /v1/completions",
    "chat_template": "the model's own template is used, with chat_template_kwargs",
    "echo": "it is for /v1/completions",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "suffix": "the model goes on with a prompt, it does not fill gaps",
}
MAX_NAMED = 8
_NOT_IN_A_HEADER = re.compile("[^A-Za-z0-9_.-]")


def unknown_fields(body: BaseModel) -> list[str]:
    """Names of the fields that mean nothing here.

    Raises:
        ApiError: 400, a field that would change the answer if we could serve it.
    """
    found: list[str] = []
    for name, value in _extras(body).items():
        if name in ACCEPTED or value is None:
            continue
        if name not in UNSUPPORTED:
            found.append(name)
        elif value not in UNSUPPORTED[name]:
            instead = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise bad_request(f"{name} is not supported by this server{instead}", name)
    return found


def _extras(body: BaseModel) -> dict[str, object]:
    """Fields of the body and of its stream options that no type of ours has."""
    options = getattr(body, "stream_options", None)
    inner = options.model_extra if isinstance(options, StreamOptions) else None
    return (body.model_extra or {}) | {
        f"stream_options.{name}": value for name, value in (inner or {}).items()
    }


def warning_of(body: BaseModel, names: Iterable[str]) -> str:
    """A line about fields that were ignored, fit for a header."""
    known = type(body).model_fields
    shown = [_named(name, known) for name in names]
    more = len(shown) - MAX_NAMED
    rest = f" and {more} more" if more > 0 else ""
    return f"unknown fields were ignored: {', '.join(shown[:MAX_NAMED])}{rest}"


def refusal_of(body: BaseModel, names: list[str]) -> Exception:
    """What answers them where the setting says so."""
    shown = _named(names[0], type(body).model_fields)
    return bad_request(f"there is no field {shown}", _printable(names[0]))


def _named(name: str, known: Iterable[str]) -> str:
    snake = re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()
    close = difflib.get_close_matches(snake, known, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"{_printable(name)}{hint}"


def _printable(name: str) -> str:
    return _NOT_IN_A_HEADER.sub("?", name[:64])
