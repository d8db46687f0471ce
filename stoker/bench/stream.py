"""One answer of an OpenAI-compatible server, taken in as it arrives; knows no sockets.

A stream of server-sent events: each `data:` line is a chunk, and what it brought and when is
noted. How many tokens there were is what the server's `usage` says. A chunk is not a token:
servers send several tokens at once, or the halves of one character.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec
from msgspec import Struct

LONGEST_ERROR_BYTES = 4096
"""Of an error's body that is kept to be shown."""
GOOD_ENDS = {"stop", "length", "tool_calls", "function_call", "content_filter"} | {
    "eos_token",  # these two are Text Generation Inference's
    "stop_sequence",
}
"""Finish reasons of whole answers; others (abort, error) are failures."""


class Delta(Struct, frozen=True):
    """What one choice of a chat's chunk adds."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[msgspec.Raw] | None = None

    @property
    def has_content(self) -> bool:
        return bool(
            self.content
            or self.reasoning_content
            or self.reasoning
            or self.refusal
            or self.tool_calls
        )


class Choice(Struct, frozen=True):
    """One choice of a chunk, of either route."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None

    @property
    def has_content(self) -> bool:
        return bool(self.text or self.token_ids or (self.delta and self.delta.has_content))


class PromptDetails(Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(Struct, frozen=True):
    """The server's own count of tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class Chunk(Struct, frozen=True):
    """One event of a stream."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: object = None


Clock = Callable[[], float]
"""Seconds that only ever rise."""


class Listener(Protocol):
    """Takes one answer in; `Reply` is one."""

    def head(self, status: int, headers: Mapping[str, str]) -> None: ...
    def feed(self, data: bytes, now: float) -> None: ...
    def end(self) -> None: ...


_CHUNKS = msgspec.json.Decoder(Chunk)


class Reply:
    """What has come of one answer. Fed with the head and the body; times are the feeder's."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.retry_after_s: float | None = None
        self.chunk_s: list[float] = []
        """When each chunk with content came."""
        self.chunk_tokens: list[int] = []
        """Tokens so far at each of those, by the server's running usage; empty: it sends none."""
        self.choice_s: float | None = None
        """When the last chunk came that had a choice, be it only the reason of its end."""
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self.is_whole = False
        """Whether the body came to its own end."""
        self._is_done = self._has_events = False
        self._trouble: str | None = None
        self._ended_alone = False
        self._rest = b""

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        """Take the status and the headers, whose names are in lower case."""
        self.status = status
        try:
            self.retry_after_s = float(headers["retry-after"])
        except (KeyError, ValueError):  # it may also be a date, which we leave
            self.retry_after_s = None

    def feed(self, data: bytes, now: float) -> None:
        """Take more of the body."""
        if self.status != 200:
            self._rest = (self._rest + data)[:LONGEST_ERROR_BYTES]
            return
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._has_events = True
                self._take(line[5:].strip(), now)

    def end(self) -> None:
        """The body is whole, as its length or its last chunk says."""
        self.is_whole = True

    @property
    def failure(self) -> str | None:
        """Why this is no whole answer, in words that can be counted; None: it is one."""
        if self.status is None:
            return "no answer"
        if self.status != 200:
            return f"HTTP {self.status}"
        if self._trouble is not None:
            return self._trouble
        if self.is_whole and not self._has_events:
            return "not a stream"
        if self.finish_reason is None or not (self.is_whole or self._is_done):
            return "stream cut off"
        if self.finish_reason not in GOOD_ENDS:
            return f"finish_reason {self.finish_reason}"
        return None

    @property
    def error_text(self) -> str:
        """The body of an answer that is an error."""
        return "" if self.status == 200 else self._rest.decode(errors="replace").strip()

    def token_times(self) -> list[float]:
        """When each chunk with tokens came, the bare end included if it was the end token's.

        A server that ends an output by an end token sends no text for it: then usage counts one
        token more than there were chunks with content, and the end came by itself.
        """
        times = list(self.chunk_s)
        counted = 0 if self.usage is None else self.usage.completion_tokens
        is_end_token = self._ended_alone and counted == len(times) + 1
        if self.choice_s is not None and (is_end_token or (counted and not times)):
            times.append(self.choice_s)
        return times

    def _take(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self._is_done = True
            return
        try:
            chunk = _CHUNKS.decode(payload)
        except msgspec.DecodeError:
            self._trouble = "unreadable chunk"
            return
        if chunk.error is not None:
            self._trouble = "error in the stream"
            return
        if chunk.usage is not None:
            self.usage = chunk.usage
        if not chunk.choices:
            return
        self.choice_s = now
        has_content = False
        for choice in chunk.choices:
            has_content = has_content or choice.has_content
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
                self._ended_alone = not has_content
        if has_content:
            self.chunk_s.append(now)
            if chunk.usage is not None:
                self.chunk_tokens.append(chunk.usage.completion_tokens)
