"""Turning the growing state of a request into what callers get.

A reader belongs to one caller. Whoever reads a request that is still live holds the
client's lock meanwhile; a request that is done changes no more.
"""

from collections.abc import Iterable
from itertools import pairwise

from cluster.frontend.requests import LiveOutput, LiveRequest, TokenLogprobs
from cluster.frontend.tokenizer import Tokenizer
from scheduler.request import Finish
from stoker.outputs import CompletionOutput, Logprob, Piece, RequestMetrics, RequestOutput


class PieceReader:
    """What is new in a request since this reader last looked."""

    def __init__(self, live: LiveRequest) -> None:
        self._live = live
        self._seen = [_Seen() for _ in live.outputs]

    @property
    def is_at_end(self) -> bool:
        """Whether the ends of all outputs have been read."""
        return all(seen.end for seen in self._seen)

    def read(self) -> list[Piece]:
        """One piece for each output with news: text, tokens, or its end."""
        pairs = zip(self._live.outputs, self._seen, strict=True)
        pieces = [self._read_output(output, seen) for output, seen in pairs]
        return [piece for piece in pieces if piece is not None]

    def _read_output(self, output: LiveOutput, seen: "_Seen") -> Piece | None:
        ends = not output.is_live and not seen.end
        first, num_texts = seen.tokens, seen.texts
        if not ends and first == len(output.token_ids) and num_texts == len(output.texts):
            return None
        seen.tokens, seen.texts, seen.end = len(output.token_ids), len(output.texts), ends
        draft = self._live.draft
        return Piece(
            index=output.index,
            text="".join(output.texts[num_texts:]),
            token_ids=output.token_ids[first:],
            logprobs=None
            if draft.sampling.logprobs is None
            else _logprobs_of(output.logprobs[first : seen.tokens], draft.tokenizer),
            finish_reason=finish_reason(output.finish) if ends else None,
            stop_reason=output.stop_reason if ends else None,
        )


class _Seen:
    """How much of one output was read."""

    __slots__ = ("end", "texts", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.texts = 0
        self.end = False


def request_output(live: LiveRequest) -> RequestOutput:
    """Everything of a request as it is now."""
    draft = live.draft
    return RequestOutput(
        request_id=draft.request_id,
        prompt=draft.prompt,
        prompt_token_ids=draft.prompt_token_ids,
        prompt_logprobs=_prompt_logprobs(live),
        outputs=[_completion(output, live) for output in live.outputs],
        finished=live.is_done,
        num_cached_tokens=max(output.num_cached_tokens for output in live.outputs),
        metrics=_metrics(live),
    )


def finish_reason(finish: Finish) -> str | None:
    return None if finish is Finish.NOT_YET else finish.name.lower()


def _completion(output: LiveOutput, live: LiveRequest) -> CompletionOutput:
    token_ids = list(output.token_ids)
    logprobs: list[dict[int, Logprob]] | None = None
    total: float | None = None
    if live.draft.sampling.logprobs is not None:
        entries = output.logprobs[: len(token_ids)]
        logprobs = _logprobs_of(entries, live.draft.tokenizer)
        total = sum(entry.logprobs[0] for entry in entries if entry is not None)
    return CompletionOutput(
        index=output.index,
        text=output.text,
        token_ids=token_ids,
        cumulative_logprob=total,
        logprobs=logprobs,
        finish_reason=finish_reason(output.finish),
        stop_reason=output.stop_reason,
        message=output.message,
    )


def _prompt_logprobs(live: LiveRequest) -> list[dict[int, Logprob] | None] | None:
    if live.draft.sampling.prompt_logprobs is None:
        return None
    found = live.prompt_logprobs
    return [
        _logprobs_at(found[i], live.draft.tokenizer) if i in found else None
        for i in range(live.draft.num_prompt)
    ]


def _logprobs_of(
    entries: Iterable[TokenLogprobs | None], tokenizer: Tokenizer | None
) -> list[dict[int, Logprob]]:
    return [{} if entry is None else _logprobs_at(entry, tokenizer) for entry in entries]


def _logprobs_at(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """The token that is there first, then the most probable ones in falling order."""
    found: dict[int, Logprob] = {}
    for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, entry.ranks, strict=True):
        text = "" if tokenizer is None else tokenizer.token_text(token_id)
        found.setdefault(token_id, Logprob(logprob, rank, text))
    return found


def _metrics(live: LiveRequest) -> RequestMetrics:
    begun = [output for output in live.outputs if output.arrivals_s]
    gaps: list[float] = []
    for output in begun:
        gaps += [after - before for before, after in pairwise(output.arrivals_s)]
    return RequestMetrics(
        queue_s=min((output.queue_s for output in begun), default=None),
        ttft_s=min((output.arrivals_s[0] - live.submitted_s for output in begun), default=None),
        itl_s=gaps,
        total_s=max((output.arrivals_s[-1] - live.submitted_s for output in begun), default=None),
        num_preemptions=sum(output.num_preemptions for output in live.outputs),
    )
