"""The figures of a batch."""

import pytest

from cluster.messages.reports import GroupStatus, Status, Totals
from stoker.outputs import CompletionOutput, RequestMetrics, RequestOutput
from stoker.summary import summary_of


def make_output(num_prompt: int, num_tokens: int, reason: str, ttft_s: float) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=[1] * num_prompt,
        outputs=[
            CompletionOutput(index=0, text="", token_ids=[1] * num_tokens, finish_reason=reason)
        ],
        finished=True,
        num_cached_tokens=num_prompt // 2,
        metrics=RequestMetrics(ttft_s=ttft_s, itl_s=[ttft_s / 10] * (num_tokens - 1)),
    )


def make_status(**totals: int) -> Status:
    return Status(
        engine_id="e",
        model="m",
        state="serving",
        uptime_s=1.0,
        groups=(GroupStatus(group=0, epoch=1, state="ready", num_blocks=64),),
        totals=Totals(**totals),
    )


def test_figures_are_of_this_batch_only() -> None:
    outputs = [make_output(10, 3, "stop", 0.2), make_output(20, 5, "length", 0.4)]

    summary = summary_of(
        outputs,
        make_status(num_steps=5, num_preemptions=1, peak_used_blocks=3),
        make_status(num_steps=12, num_mixed_steps=2, num_preemptions=4, peak_used_blocks=9),
        wall_s=2.0,
    )

    assert (summary.requests, summary.prompt_tokens, summary.cached_tokens) == (2, 30, 15)
    assert (summary.output_tokens, summary.output_tokens_per_s) == (8, 4.0)
    assert (summary.steps, summary.mixed_steps, summary.preemptions) == (7, 2, 3)
    assert (summary.peak_used_blocks, summary.blocks_per_group) == (9, 64)
    assert (summary.ttft_p50_s, summary.ttft_p95_s) == (0.2, 0.4)
    assert summary.itl_p50_s == pytest.approx(0.04)
    assert summary.outputs_by_finish == {"stop": 1, "length": 1}


def test_a_batch_without_tokens_has_figures_too() -> None:
    summary = summary_of([], make_status(), make_status(), wall_s=0.0)

    assert summary.ttft_p50_s is None
    assert dict(summary.rows())["TTFT p50 / p95"] == "- / -"
