"""Request traces and data sets in files.

A trace is a JSON list (or one object a line, in a .jsonl file) of requests, each with
`prompt_token_ids`, `prompt`, `messages`, or a `prompt_len` of which a prompt is made up; and
perhaps `max_tokens` and `arrival_s`. A data set is a list of conversations as in ShareGPT.
"""

from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from stoker.bench.errors import BenchError
from stoker.bench.workload import Call, Messages, Prompt


class BadTrace(BenchError):
    """A file of requests that cannot be read, or not be used as it is asked for."""


class Traced(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request of a trace."""

    prompt_token_ids: list[int] = []
    prompt: str = ""
    messages: Messages = []
    prompt_len: int = 0
    """Tokens of a prompt that is to be made up."""
    max_tokens: int | None = None
    arrival_s: float | None = None

    @property
    def as_call(self) -> Call:
        prompt: Prompt = self.prompt_token_ids or self.prompt or self.messages
        return Call(prompt, self.max_tokens, self.arrival_s, self.prompt_len)


class Turn(Struct, frozen=True):
    """One turn of a conversation, in either dialect of such files."""

    who: str = msgspec.field(name="from", default="")
    value: str = ""
    role: str = ""
    content: str = ""

    @property
    def as_message(self) -> dict[str, object]:
        role = self.role or {"human": "user", "gpt": "assistant"}.get(self.who, self.who)
        return {"role": role, "content": self.content or self.value}


class Conversation(Struct, frozen=True):
    """One entry of a ShareGPT-like data set; other fields are left."""

    conversations: list[Turn] = []
    messages: list[Turn] = []

    def opening(self) -> Messages:
        """Everything before the first answer."""
        found: Messages = []
        for turn in self.conversations or self.messages:
            message = turn.as_message
            if message["role"] == "assistant":
                break
            found.append(message)
        return found


def read_trace(path: Path) -> list[Traced]:
    """All requests of a trace.

    Raises:
        BadTrace: it is none, or empty; the message says where.
    """
    entries = _read(path, Traced)
    for i, entry in enumerate(entries):
        kinds = (entry.prompt_token_ids, entry.prompt, entry.messages, entry.prompt_len)
        if sum(bool(kind) for kind in kinds) != 1:
            raise BadTrace(
                f"{path}: request {i} needs one of prompt_token_ids, prompt, messages and "
                f"prompt_len, and has {sum(bool(kind) for kind in kinds)}"
            )
    return entries


def read_conversations(path: Path, *, max_tokens: int | None) -> list[Call]:
    """The opening of each conversation of a ShareGPT-like file that has one."""
    openings = (entry.opening() for entry in _read(path, Conversation))
    calls = [Call(opening, max_tokens) for opening in openings if opening]
    if not calls:
        raise BadTrace(f"{path}: no conversation in it begins with a user's turn")
    return calls


Entry = TypeVar("Entry", bound=Struct)


def _read(path: Path, kind: type[Entry]) -> list[Entry]:
    data = path.read_bytes()
    try:
        if path.suffix == ".jsonl":
            lines = [line for line in data.splitlines() if line.strip()]
            entries = [msgspec.json.decode(line, type=kind) for line in lines]
        else:
            entries = msgspec.json.decode(data, type=list[kind])  # type: ignore[valid-type]
    except msgspec.DecodeError as error:
        raise BadTrace(f"{path} cannot be read as requests: {error}") from error
    if not entries:
        raise BadTrace(f"{path} holds no request")
    return entries
