"""The engine core's metrics as plain numbers, for whoever asks."""

import functools
from collections.abc import Iterable, Mapping
from importlib.metadata import version

from cluster.messages.reports import Distribution, EngineMetrics, Sample, Status
from cluster.recovery import Recoveries
from scheduler.meter import Histogram, Meter
from scheduler.request import Finish
from scheduler.stats import SchedulerStats

REFUSALS = ("invalid", "too_long", "queue_full", "timeout", "shutting_down", "no_workers")
"""Reasons of a `Rejection`; each is shown from the start, so that its rate has a beginning."""


def build_metrics(
    status: Status,
    stats: SchedulerStats | None,
    meter: Meter,
    refused: Mapping[str, int],
    start_s: Mapping[str, float],
    recoveries: Recoveries,
) -> EngineMetrics:
    """All families of `cluster.metrics.ENGINE`, by name.

    Args:
        stats: None until the first group is ready.
        refused: requests that were refused before the scheduler saw them, by reason.
        start_s: seconds of each phase of the start; empty until it is over.
        recoveries: from losses of worker groups.
    """
    return EngineMetrics(
        model=status.model,
        values=_gauges(status, stats)
        | {"start_seconds": _each(start_s.items())}
        | _counters(status, stats, meter, refused)
        | {"group_restarts": _each(recoveries.num_restarts.items())},
        distributions=_distributions(meter)
        | {"recovery_seconds": tuple(_of(h, phase) for phase, h in recoveries.seconds.items())},
    )


def _gauges(status: Status, stats: SchedulerStats | None) -> dict[str, tuple[Sample, ...]]:
    groups = status.groups
    num_blocks = sum(group.num_blocks for group in groups)
    num_used = sum(group.num_used_blocks for group in groups)
    return {
        "engine_up": _one(1),
        "engine_info": (Sample((status.model, status.engine_id, _version(), status.state), 1.0),),
        "engine_uptime_seconds": _one(status.uptime_s),
        "requests_running": _one(status.num_running),
        "requests_waiting": _one(status.num_waiting),
        "waiting_prompt_tokens": _one(stats.waiting_tokens if stats else 0),
        "requests_promised": _one(stats.promised if stats else 0),
        "clients": _one(status.num_clients),
        "groups_ready": _one(sum(group.state == "ready" for group in groups)),
        "group_epoch": _each((str(g.group), g.epoch) for g in groups),
        "group_requests_running": _each((str(g.group), g.num_running) for g in groups),
        "kv_blocks": _each((str(g.group), g.num_blocks) for g in groups),
        "kv_blocks_used": _each((str(g.group), g.num_used_blocks) for g in groups),
        "kv_blocks_cached": _each((str(g.group), g.num_cached_blocks) for g in groups),
        "kv_cache_usage_ratio": _one(num_used / num_blocks if num_blocks else 0.0),
    }


def _counters(
    status: Status,
    stats: SchedulerStats | None,
    meter: Meter,
    refused: Mapping[str, int],
) -> dict[str, tuple[Sample, ...]]:
    totals = status.totals
    by_reason = dict.fromkeys(REFUSALS, 0)
    for counts in (refused, stats.refused if stats else {}):
        for reason, count in counts.items():
            by_reason[reason] = by_reason.get(reason, 0) + count
    finishes = [finish.name.lower() for finish in Finish if finish is not Finish.NOT_YET]
    return {
        "engine_restarts": _one(status.num_engine_restarts),
        "requests_accepted": _one(totals.num_requests),
        "requests_continued": _one(stats.continued if stats else 0),
        "requests_finished": _each((name, totals.finished.get(name, 0)) for name in finishes),
        "requests_refused": _each(by_reason.items()),
        "prompt_tokens": _one(totals.prompt_tokens),
        "generation_tokens": _one(totals.output_tokens),
        "tokens": _each(
            (
                ("prefill", totals.prefill_tokens),
                ("decode", totals.decode_tokens),
                ("recomputed", totals.recomputed_tokens),
                ("cached", totals.cached_tokens),
            )
        ),
        "prefix_cache_queried_tokens": _one(stats.queried_tokens if stats else 0),
        "prefix_cache_hit_tokens": _one(totals.cached_tokens),
        "requests_poisoned": _one(stats.poisoned if stats else 0),
        "dropped_tokens": _one(stats.dropped_tokens if stats else 0),
        "preemptions": _one(totals.num_preemptions),
        "steps": _each(_steps(stats)),
        "stale_results": _one(stats.stale_results if stats else 0),
        "messages_dropped": _one(totals.num_dropped),
        "connections_turned_away": _one(totals.num_turned_away),
        "clients_cut_off": _one(totals.num_cut_clients),
        "metric_errors": _one(meter.num_errors + meter.num_clipped),
    }


def _steps(stats: SchedulerStats | None) -> Iterable[tuple[str, int]]:
    if stats is None:
        return [("prefill", 0), ("decode", 0), ("mixed", 0)]
    alone = stats.steps - stats.mixed_steps - stats.prefill_steps
    return [("prefill", stats.prefill_steps), ("decode", alone), ("mixed", stats.mixed_steps)]


def _distributions(meter: Meter) -> dict[str, tuple[Distribution, ...]]:
    return {
        "time_to_first_token_seconds": (_of(meter.first_token_s),),
        "inter_token_seconds": (_of(meter.gap_s),),
        "request_seconds": (_of(meter.whole_s),),
        "request_queue_seconds": (_of(meter.queue_s),),
        "request_prefill_seconds": (_of(meter.prefill_s),),
        "request_decode_seconds": (_of(meter.decode_s),),
        "request_inference_seconds": (_of(meter.inference_s),),
        "request_token_seconds": (_of(meter.per_token_s),),
        "request_prompt_tokens": (_of(meter.prompt_tokens),),
        "request_generation_tokens": (_of(meter.output_tokens),),
        "step_tokens": (
            _of(meter.step_prefill_tokens, "prefill"),
            _of(meter.step_decode_tokens, "decode"),
        ),
        "step_all_tokens": (_of(meter.step_tokens),),
        "step_seconds": tuple(_of(each, phase) for phase, each in meter.phase_s.items()),
    }


def _of(histogram: Histogram, *labels: str) -> Distribution:
    return Distribution(labels, tuple(histogram.counts), histogram.sum)


@functools.cache
def _version() -> str:
    return version("stoker")


def _one(value: float) -> tuple[Sample, ...]:
    return (Sample((), float(value)),)


def _each(values: Iterable[tuple[str, float]]) -> tuple[Sample, ...]:
    return tuple(Sample((label,), float(value)) for label, value in values)
