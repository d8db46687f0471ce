"""The figures of one batch: what the client measured, and what the engine counted meanwhile."""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.messages.reports import Status
from stoker.outputs import RequestOutput
from stoker.spread import percentile


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One batch in numbers. Seconds and tokens; None where there was nothing to measure."""

    requests: int
    outputs_by_finish: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    itl_p50_s: float | None
    itl_p95_s: float | None
    wall_s: float
    output_tokens_per_s: float
    steps: int
    mixed_steps: int
    preemptions: int
    peak_used_blocks: int
    """Most blocks of one group that were held at once, since the engine began."""
    blocks_per_group: int

    def rows(self) -> list[tuple[str, str]]:
        """Names and values for a table that people read."""
        ends = ", ".join(f"{n} {reason}" for reason, n in sorted(self.outputs_by_finish.items()))
        return [
            ("requests", f"{self.requests} ({ends})" if ends else str(self.requests)),
            ("prompt tokens", str(self.prompt_tokens)),
            ("tokens from cache", str(self.cached_tokens)),
            ("output tokens", str(self.output_tokens)),
            ("TTFT p50 / p95", f"{_shown(self.ttft_p50_s)} / {_shown(self.ttft_p95_s)}"),
            ("ITL p50 / p95", f"{_shown(self.itl_p50_s)} / {_shown(self.itl_p95_s)}"),
            ("output tokens/s", f"{self.output_tokens_per_s:.1f}"),
            ("steps", str(self.steps)),
            ("mixed steps", str(self.mixed_steps)),
            ("preemptions", str(self.preemptions)),
            ("blocks used of all", f"{self.peak_used_blocks} of {self.blocks_per_group}"),
        ]


def summary_of(
    outputs: Sequence[RequestOutput], before: Status, after: Status, wall_s: float
) -> Summary:
    """The figures of `outputs`, made between two statuses of the same engine.

    Steps and preemptions are the engine's, so they count other clients' requests too.
    """
    completions = [completion for output in outputs for completion in output.outputs]
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    ttfts = sorted(o.metrics.ttft_s for o in outputs if o.metrics.ttft_s is not None)
    itls = sorted(gap for output in outputs for gap in output.metrics.itl_s)
    by_finish: dict[str, int] = {}
    for completion in completions:
        reason = completion.finish_reason or "unfinished"
        by_finish[reason] = by_finish.get(reason, 0) + 1
    old, new = before.totals, after.totals
    return Summary(
        requests=len(outputs),
        outputs_by_finish=by_finish,
        prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        cached_tokens=sum(output.num_cached_tokens for output in outputs),
        output_tokens=num_tokens,
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p95_s=percentile(ttfts, 95),
        itl_p50_s=percentile(itls, 50),
        itl_p95_s=percentile(itls, 95),
        wall_s=wall_s,
        output_tokens_per_s=num_tokens / wall_s if wall_s > 0 else 0.0,
        steps=new.num_steps - old.num_steps,
        mixed_steps=new.num_mixed_steps - old.num_mixed_steps,
        preemptions=new.num_preemptions - old.num_preemptions,
        peak_used_blocks=new.peak_used_blocks,
        blocks_per_group=max((group.num_blocks for group in after.groups), default=0),
    )


def _shown(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"
