"""The figures of one run, from the records of its requests.

Requests that failed or were refused are counted apart and are part of no latency and no token
count. Latencies are milliseconds.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from stoker.bench.load import Run, is_ok, most_under_way
from stoker.bench.record import Outcome, Record
from stoker.spread import Spread, spread_of, weighted_spread

WARM_SHARE = 0.05
"""Of prompt tokens from a cache, above which a run that did not mean to study it is warned of."""
BUSY_SHARE = 0.9
"""Of a core, above which the client may be what is measured."""
LAG_SHARE = 0.1
"""Of the median TTFT, above which the client's own delay is worth a warning."""
LEAST_LAG_MS = 5.0
"""Delay of the client that is never worth a warning."""


LONGEST_EXAMPLE = 400
"""Characters of what a server says about a failure."""


class Goodput(Struct, frozen=True, kw_only=True):
    """Requests that met every objective."""

    objectives_ms: dict[str, float]
    met: int
    share: float
    """Of all requests sent, those that failed or were refused among them."""
    requests_per_s: float


class Figures(Struct, frozen=True, kw_only=True):
    """One run in numbers. None: there was nothing to measure, or the server does not say."""

    duration_s: float
    """From the start to the end of the last answer."""
    sent: int
    completed: int
    refused: int
    """429."""
    failed: int
    failures: dict[str, int]
    """How many of the refused and failed for which reason."""
    failure_examples: dict[str, str]
    """What the server said of the first one of each reason, if it said anything."""
    failure_share: float
    """Refused and failed, of all sent."""
    retry_after_s: Spread | None
    """What refusals said about when to come again."""
    prompt_tokens: int
    cached_tokens: int | None
    cache_hit_rate: float | None
    output_tokens: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Spread | None
    """From when a request was due to its first chunk with tokens."""
    tpot_ms: Spread | None
    """Per request of two tokens or more: (end - first) / (tokens - 1)."""
    itl_ms: Spread | None
    """Between tokens: gaps between chunks, divided by the tokens they brought."""
    chunk_gap_ms: Spread | None
    """Between chunks, undivided: the pauses that a reader sees."""
    e2e_ms: Spread | None
    """From when a request was due to the end of its answer."""
    tokens_per_chunk: float | None
    peak_concurrency: int
    goodput: Goodput | None
    without_usage: int
    """Completed requests whose tokens are not known."""
    ended_early: int
    """Completed requests with fewer tokens than they asked for."""
    client_lag_ms: Spread | None
    """From when only the client kept a request to when it set about sending it."""
    client_cpu_share: float
    """Processor time of the client by the run's duration; near 1, it is the bottleneck."""


def figures_of(
    run: Run, *, client_cpu_s: float = 0.0, objectives_ms: Mapping[str, float] | None = None
) -> Figures:
    """The figures of a run that is over."""
    records = run.records
    good = [record for record in records if is_ok(record)]
    bad = [record for record in records if not is_ok(record)]
    duration_s = max(run.ended_s - run.began_s, 1e-9)
    prompt = sum(record.prompt_tokens for record in good)
    output = sum(record.output_tokens for record in good)
    told = [record for record in good if record.cached_tokens is not None]
    cached = sum(record.cached_tokens or 0 for record in told)
    told_prompt = sum(record.prompt_tokens for record in told)
    chunks = sum(record.num_chunks for record in good if record.has_usage)
    refused = sum(record.outcome is Outcome.REFUSED for record in bad)
    return Figures(
        duration_s=duration_s,
        sent=len(records),
        completed=len(good),
        refused=refused,
        failed=len(bad) - refused,
        failures=dict(Counter(record.reason for record in bad).most_common()),
        failure_examples=_examples(bad),
        failure_share=len(bad) / len(records) if records else 0.0,
        retry_after_s=spread_of(r.retry_after_s for r in bad if r.retry_after_s is not None),
        prompt_tokens=prompt,
        cached_tokens=cached if told else None,
        cache_hit_rate=cached / told_prompt if told_prompt else None,
        output_tokens=output,
        requests_per_s=len(good) / duration_s,
        input_tokens_per_s=prompt / duration_s,
        output_tokens_per_s=output / duration_s,
        total_tokens_per_s=(prompt + output) / duration_s,
        ttft_ms=_ms(record.ttft_s for record in good),
        tpot_ms=_ms(record.tpot_s for record in good),
        itl_ms=weighted_spread(
            (1e3 * gap_s, weight) for record in good for gap_s, weight in token_gaps(record)
        ),
        chunk_gap_ms=_ms(gap for record in good for gap in record.gaps_s),
        e2e_ms=_ms(record.e2e_s for record in good),
        tokens_per_chunk=output / chunks if chunks else None,
        peak_concurrency=most_under_way(records),
        goodput=goodput_of(records, objectives_ms, duration_s) if objectives_ms else None,
        without_usage=sum(not record.has_usage for record in good),
        ended_early=sum(
            record.has_usage and record.output_tokens < (record.max_tokens or 0) for record in good
        ),
        client_lag_ms=_ms(record.lag_s for record in records),
        client_cpu_share=client_cpu_s / duration_s,
    )


def _examples(bad: Iterable[Record]) -> dict[str, str]:
    found: dict[str, str] = {}
    for record in bad:
        if record.detail:
            found.setdefault(record.reason, record.detail[:LONGEST_EXAMPLE])
    return found


def token_gaps(record: Record) -> Iterator[tuple[float, float]]:
    """Seconds between tokens, and how many times each counts.

    A gap of g seconds that brought c tokens is c gaps of g/c. One that brought none is a part of
    the next one.
    """
    waited_s = 0.0
    for gap_s, num_tokens in zip(record.gaps_s, record.gap_tokens, strict=True):
        waited_s += gap_s
        if num_tokens > 0:
            yield waited_s / num_tokens, num_tokens
            waited_s = 0.0


def goodput_of(
    records: Sequence[Record], objectives_ms: Mapping[str, float], duration_s: float
) -> Goodput:
    met = sum(is_ok(record) and _meets(record, objectives_ms) for record in records)
    return Goodput(
        objectives_ms=dict(objectives_ms),
        met=met,
        share=met / len(records) if records else 0.0,
        requests_per_s=met / duration_s,
    )


OBJECTIVES = ("ttft", "tpot", "e2el")
"""What an objective can be set for; vLLM's names."""


def _meets(record: Record, objectives_ms: Mapping[str, float]) -> bool:
    """A figure that a request does not have, such as the TPOT of one token, cannot be missed."""
    found_s = {"ttft": record.ttft_s, "tpot": record.tpot_s, "e2el": record.e2e_s}
    return all(
        (value := found_s[name]) is None or 1e3 * value <= limit
        for name, limit in objectives_ms.items()
    )


def warnings_of(figures: Figures, *, expects_cache: bool) -> list[str]:
    """What makes these figures say less, or something else, than they seem to."""
    found = []
    rate = figures.cache_hit_rate
    if rate is not None and rate > WARM_SHARE and not expects_cache:
        found.append(
            f"{rate:.0%} of the prompt tokens came from the server's prefix cache, so prompts cost "
            "less than new ones would. Use fresh prompts, --cache-salt, or a server restarted or "
            "without prefix caching; --expect-cache says that it is meant"
        )
    if figures.without_usage:
        found.append(
            f"{figures.without_usage} answers came without usage, although it was asked for: "
            "their tokens are counted nowhere"
        )
    if figures.ended_early:
        found.append(
            f"{figures.ended_early} answers ended before the tokens they asked for; --ignore-eos "
            "makes them go on, where the server knows it"
        )
    if (lag := figures.client_lag_ms) is not None:
        usual_ms = figures.ttft_ms.p50 if figures.ttft_ms is not None else 0.0
        if lag.p99 > max(LEAST_LAG_MS, LAG_SHARE * usual_ms):
            found.append(
                f"this client sent requests late (p99 {lag.p99:.1f} ms), and that is part of the "
                "latencies: it, or the machine, is too busy"
            )
    if figures.client_cpu_share > BUSY_SHARE:
        found.append(
            f"this client used {figures.client_cpu_share:.0%} of a core: it may be what was "
            "measured. Run it on another machine, or with less load"
        )
    return found


def _ms(seconds: Iterable[float | None]) -> Spread | None:
    return spread_of(1e3 * value for value in seconds if value is not None)
