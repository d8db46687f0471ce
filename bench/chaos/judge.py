"""What a storm has done to streams: dropped, lost, doubled, changed; and how long they stood."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.chaos.load import Answer

LOGPROB_SLACK = 1e-4
"""Of log-probabilities of the same token, which is above what one rounding more or less does."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many streams went wrong, and the first words of each kind."""

    num_streams: int
    num_tokens: int
    dropped: list[str]
    short: list[str]
    """Tokens are missing."""
    doubled: list[str]
    """There are tokens that should not be."""
    changed: list[str]
    """Other tokens, texts, ends or log-probabilities"""

    @property
    def is_clean(self) -> bool:
        return not (self.dropped or self.short or self.doubled or self.changed)


def judge(answers: Iterable[Answer], expected: Mapping[int, Answer]) -> Verdict:
    """Compare each answer with that to the same call in an undisturbed cluster."""
    verdict = Verdict(0, 0, [], [], [], [])
    num_streams = num_tokens = 0
    for answer in answers:
        num_streams += len(answer.tokens)
        num_tokens += sum(map(len, answer.tokens))
        right = expected[answer.call.number]
        name = f"call {answer.call.number} ({answer.call.kind})"
        if answer.error:
            verdict.dropped.append(f"{name}: {answer.error}")
            continue
        for got, wanted in zip(answer.tokens, right.tokens, strict=True):
            where = f"{name}: {_difference(got, wanted)}"
            if got == wanted:
                continue
            if got == wanted[: len(got)]:
                verdict.short.append(where)
            elif _has_doubled(got, wanted):
                verdict.doubled.append(where)
            else:
                verdict.changed.append(where)
        if (answer.text, answer.finish) != (right.text, right.finish):
            verdict.changed.append(f"{name}: text or end differ")
        if not _are_close(answer.logprobs, right.logprobs):
            verdict.changed.append(f"{name}: log-probabilities differ")
    return Verdict(
        num_streams, num_tokens, verdict.dropped, verdict.short, verdict.doubled, verdict.changed
    )


def _has_doubled(got: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether what is there is what is wanted with a piece of it once more."""
    extra = len(got) - len(wanted)
    return extra > 0 and any(
        list(got[:at]) + list(got[at + extra :]) == list(wanted) for at in range(len(wanted) + 1)
    )


def _difference(got: Sequence[int], wanted: Sequence[int]) -> str:
    pairs = zip(got, wanted, strict=False)
    at = next(
        (i for i, (one, other) in enumerate(pairs) if one != other), min(map(len, (got, wanted)))
    )
    return f"{len(got)} tokens of {len(wanted)}, alike up to {at}"


def _are_close(got: Sequence[float], wanted: Sequence[float]) -> bool:
    return len(got) == len(wanted) and bool(np.allclose(got, wanted, rtol=0, atol=LOGPROB_SLACK))


def stalls_at(answers: Iterable[Answer], moments: Sequence[float]) -> list[float]:
    """For each moment, and each stream that was alive then: the pause between its pieces."""
    stalls = []
    when = np.asarray(moments)
    for answer in answers:
        at = np.asarray(answer.at)
        inside = when[(when >= at[0]) & (when < at[-1])]
        after = np.searchsorted(at, inside, side="right")
        stalls += (at[after] - at[after - 1]).tolist()
    return stalls


def token_rate(answers: Iterable[Answer], spans: Sequence[tuple[float, float]]) -> float:
    """Tokens per second of all streams together, over these spans of time."""
    at = np.concatenate([answer.at[1:] for answer in answers] or [[]])
    count = np.concatenate([answer.num_tokens for answer in answers] or [[]])
    num_tokens = sum(float(count[(at >= begin) & (at < end)].sum()) for begin, end in spans)
    seconds = sum(end - begin for begin, end in spans)
    return num_tokens / seconds if seconds else 0.0


def percentile(values: Sequence[float], share: float) -> float:
    """0 if there are none."""
    return float(np.percentile(values, share)) if len(values) else 0.0
