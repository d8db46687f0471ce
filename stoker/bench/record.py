"""What became of one request of a load: its times, its tokens, or why it failed.

All times are seconds of one monotonic clock. Latencies count from when the request was due, not
from when the client got round to sending it: a client that waits while the server is slow would
otherwise leave the worst moments out (coordinated omission, Gil Tene).
"""

from enum import Enum
from itertools import pairwise

from msgspec import Struct

from stoker.bench.stream import Reply

REFUSED_STATUS = 429


class Outcome(Enum):
    """How a request ended."""

    OK = "ok"
    REFUSED = "refused"
    """429: the server had no room and said so."""
    FAILED = "failed"


class Record(Struct, frozen=True, kw_only=True):
    """One request of a load."""

    due_s: float
    """When it should go out: its arrival, or the moment a place for it was free."""
    free_s: float
    """When nothing but the client itself kept it from going out."""
    sent_s: float
    """When the client set about sending it."""
    first_s: float | None
    """When the first chunk with tokens came."""
    end_s: float
    """When the last chunk with tokens or with the end came; of a failed one, when it failed."""
    outcome: Outcome
    reason: str = ""
    """Why it failed, in words that can be counted."""
    detail: str = ""
    """What the server said of it."""
    retry_after_s: float | None = None
    has_usage: bool = False
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    """Of the prompt, from the server's cache; None: it does not say."""
    output_tokens: int = 0
    max_tokens: int | None = None
    """Tokens that were asked for; None: the request did not say."""
    num_chunks: int = 0
    """Chunks with tokens."""
    gaps_s: tuple[float, ...] = ()
    """Between one chunk with tokens and the next."""
    gap_tokens: tuple[float, ...] = ()
    """Tokens that each of these gaps brought: known, or shared out evenly; see `shares`."""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.due_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None where there is no second token."""
        if self.first_s is None or self.output_tokens < 2:
            return None
        return (self.end_s - self.first_s) / (self.output_tokens - 1)

    @property
    def lag_s(self) -> float:
        """How long the client itself held it up."""
        return self.sent_s - self.free_s


def record_of(
    reply: Reply,
    *,
    due_s: float,
    free_s: float,
    sent_s: float,
    now: float,
    max_tokens: int | None,
    trouble: str | None = None,
) -> Record:
    """The record of a request whose answer is over.

    Args:
        now: used as the end of one that failed.
        trouble: what kept the client from having an answer, if something did.
    """
    usage = reply.usage
    num_output = 0 if usage is None else usage.completion_tokens
    times = reply.token_times()
    failure = trouble or reply.failure
    if failure is None and usage is not None and num_output == 0 and max_tokens != 0:
        failure = "no tokens"
    if failure is not None:
        is_refusal = trouble is None and reply.status == REFUSED_STATUS
        return Record(
            due_s=due_s,
            free_s=free_s,
            sent_s=sent_s,
            first_s=times[0] if times else None,
            end_s=now,
            outcome=Outcome.REFUSED if is_refusal else Outcome.FAILED,
            reason=failure,
            detail=reply.error_text,
            retry_after_s=reply.retry_after_s,
            max_tokens=max_tokens,
        )
    details = None if usage is None else usage.prompt_tokens_details
    return Record(
        due_s=due_s,
        free_s=free_s,
        sent_s=sent_s,
        first_s=times[0] if times else None,
        end_s=now if reply.choice_s is None else reply.choice_s,
        outcome=Outcome.OK,
        has_usage=usage is not None,
        prompt_tokens=0 if usage is None else usage.prompt_tokens,
        cached_tokens=None if details is None else details.cached_tokens,
        output_tokens=num_output,
        max_tokens=max_tokens,
        num_chunks=len(times),
        gaps_s=tuple(later - earlier for earlier, later in pairwise(times)),
        gap_tokens=shares(len(times), num_output, reply.chunk_tokens),
    )


def shares(num_chunks: int, num_tokens: int, running: list[int]) -> tuple[float, ...]:
    """How many tokens each gap between two chunks stands for.

    A server that tells its usage with every chunk says so itself. Otherwise the tokens after the
    first are shared evenly over the gaps: one each where every chunk brought one.

    Args:
        running: tokens so far at each chunk, as the server told; empty: it did not.
    """
    if num_chunks < 2 or num_tokens < 2:
        return (0.0,) * max(0, num_chunks - 1)
    if len(running) == num_chunks:
        return tuple(float(later - earlier) for earlier, later in pairwise(running))
    return ((num_tokens - 1) / (num_chunks - 1),) * (num_chunks - 1)
