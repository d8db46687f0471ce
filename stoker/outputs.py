"""What `generate` and `chat` return; names and shapes as vLLM's."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Logprob(NamedTuple):
    """One token that was possible at a position."""

    logprob: float
    """Natural logarithm of its probability, of the raw logits."""
    rank: int | None
    """1 for the most probable token of the vocabulary."""
    decoded_token: str
    """Its text; U+FFFD where the token is only a part of a character."""


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One of a request's `n` outputs."""

    index: int
    text: str
    token_ids: list[int]
    """Also holds tokens that add no text: an end token, the tokens of a trimmed stop text."""
    cumulative_logprob: float | None = None
    """Sum over `token_ids`; None unless `logprobs` was asked for."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each of `token_ids`, the token itself and the most probable ones."""
    finish_reason: str | None = None
    """stop, length, abort, timeout or error; None while it goes on."""
    stop_reason: int | str | None = None
    """The stop text or stop token id that ended it; None for the model's own end token."""
    message: str = ""
    """What went wrong, for `timeout` and `error`."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """Durations of one request in seconds, by the client's clock except `queue_s`."""

    queue_s: float | None = None
    """From the engine's having it to the first slice of its prompt, by the engine's clock."""
    ttft_s: float | None = None
    """From submission to the first token of any output."""
    itl_s: list[float] = field(default_factory=list)
    """Between one token and the next, of all outputs."""
    total_s: float | None = None
    """From submission to the last token."""
    num_preemptions: int = 0


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """The answer to one prompt."""

    request_id: str
    prompt: str | None
    """The text submitted; None for token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """None for the first token, which nothing predicts."""
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values were in the prefix cache."""
    metrics: RequestMetrics


@dataclass(slots=True, kw_only=True)
class Piece:
    """What one output gained since the piece before."""

    index: int
    """Which of the `n` outputs."""
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    """Set on the last piece of this output."""
    stop_reason: int | str | None = None
