"""What `/v1/completions` answers, field by field."""

from collections.abc import Sequence
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from cluster.api.openai.token_logprobs import ShownToken, TokenEntry
from cluster.api.openai.usage import Usage


class CompletionLogprobs(Struct, frozen=True, kw_only=True):
    """Columns: row i of each speaks of one token."""

    tokens: list[str]
    """A token that is only a part of a character is `bytes:\\xe2\\x80`."""
    token_logprobs: list[float | None]
    """None for the first token of a prompt."""
    top_logprobs: list[dict[str, float] | None]
    """The likeliest tokens, and the one that is there if it is not among them."""
    text_offset: list[int]
    """Characters of `text` before each token."""


class PromptLogprob(Struct, frozen=True, kw_only=True):
    """One token that was possible at a position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


class CompletionChoice(Struct, frozen=True, kw_only=True):
    """One output, or in a chunk what it gained."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    """The stop text or stop token id; None for the model's own end token."""
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    """By token id; only if asked for."""
    token_ids: list[int] | UnsetType = UNSET
    """Only with `return_token_ids`, as is the next."""
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(Struct, frozen=True, kw_only=True):
    """The whole answer."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event of a stream: what one output gained, or at the end the usage."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    """Only if asked for."""


def completion_logprobs(entries: Sequence[TokenEntry]) -> CompletionLogprobs:
    """Entries as columns."""
    return CompletionLogprobs(
        tokens=[_name(entry.token) for entry in entries],
        token_logprobs=[entry.token.logprob if entry.is_known else None for entry in entries],
        top_logprobs=[_top(entry) if entry.is_known else None for entry in entries],
        text_offset=[entry.offset for entry in entries],
    )


def prompt_logprobs(entries: Sequence[TokenEntry]) -> list[dict[str, PromptLogprob] | None]:
    """Entries of a prompt, as vLLM shows them."""
    return [
        {str(one.token_id): _prompt_logprob(one) for one in (*entry.likeliest, entry.token)}
        if entry.is_known
        else None
        for entry in entries
    ]


def _prompt_logprob(token: ShownToken) -> PromptLogprob:
    return PromptLogprob(logprob=token.logprob, rank=token.rank, decoded_token=token.text)


def _top(entry: TokenEntry) -> dict[str, float]:
    top: dict[str, float] = {}
    for token in (*entry.likeliest, entry.token):
        top.setdefault(_name(token), token.logprob)
    return top


def _name(token: ShownToken) -> str:
    """The token as text without loss, as OpenAI's completions write it."""
    try:
        return token.piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.piece)
