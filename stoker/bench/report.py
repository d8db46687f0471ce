"""The figures of runs as tables for people and as one JSON document for programs."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec
from msgspec import Struct

from stoker.bench.figures import Figures
from stoker.bench.record import Record
from stoker.spread import Spread

Rows: TypeAlias = list[list[str]]

FORMAT = 1
"""Of the JSON document; rises when a field changes its meaning or goes."""


def write_json(report: Struct, path: str) -> None:
    """Write the document; - is standard output."""
    text = msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")


class Point(Struct, frozen=True, kw_only=True):
    """One run of a sweep, or the only one."""

    request_rate: float | None
    """Requests per second; None: not by a rate, or all at once; see `arrivals`."""
    max_concurrency: int | None
    """Most requests under way; None: no limit."""
    arrivals: str
    """How requests arrived, in words."""
    figures: Figures
    warnings: list[str]
    requests: list[Record] | None = None
    """Each request, with --detailed; times are seconds of one clock whose zero means nothing."""

    @property
    def label(self) -> str:
        """What sets it apart in a sweep."""
        if self.request_rate is not None:
            return f"{self.request_rate:g}/s"
        return f"{self.max_concurrency} at once" if self.max_concurrency else self.arrivals


class ServeReport(Struct, frozen=True, kw_only=True):
    """What `stoker bench serve --json` writes."""

    format: int = FORMAT
    machine: str
    """Of the client."""
    url: str
    model: str
    workload: str
    seed: int
    request: dict[str, object]
    """The body of the first request, its prompt shortened: everything that is sent."""
    runs: list[Point]


LATENCIES = (
    ("TTFT", "ttft_ms"),
    ("TPOT", "tpot_ms"),
    ("ITL", "itl_ms"),
    ("gap between chunks", "chunk_gap_ms"),
    ("end to end", "e2e_ms"),
)
"""How each latency is called in a table, and its field in `Figures`."""


def count_rows(point: Point) -> Rows:
    """Everything about one run that is one number."""
    figures = point.figures
    rows = [
        ["", "value"],
        ["arrivals", point.arrivals],
        ["requests sent", str(figures.sent)],
        ["completed", str(figures.completed)],
        ["refused (429)", str(figures.refused)],
        ["failed", str(figures.failed)],
        *([f"  {reason}", str(count)] for reason, count in figures.failures.items()),
        ["duration, s", f"{figures.duration_s:.2f}"],
        ["most at once", str(figures.peak_concurrency)],
        ["requests/s", f"{figures.requests_per_s:.2f}"],
        ["input tokens", str(figures.prompt_tokens)],
        ["of these from cache", _cache(figures)],
        ["output tokens", str(figures.output_tokens)],
        ["input tokens/s", f"{figures.input_tokens_per_s:.1f}"],
        ["output tokens/s", f"{figures.output_tokens_per_s:.1f}"],
        ["all tokens/s", f"{figures.total_tokens_per_s:.1f}"],
        ["tokens per chunk", _number(figures.tokens_per_chunk)],
    ]
    if figures.retry_after_s is not None:
        wait = figures.retry_after_s
        rows.append(["Retry-After, s", f"{wait.min:g} to {wait.max:g}, mean {wait.mean:.1f}"])
    if (goodput := figures.goodput) is not None:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in goodput.objectives_ms.items())
        rows.append([f"goodput ({limits}), requests/s", f"{goodput.requests_per_s:.2f}"])
        rows.append(["  share of all sent", f"{goodput.share:.1%}"])
    lag = figures.client_lag_ms
    rows.append(["client's own delay p99, ms", _number(None if lag is None else lag.p99)])
    rows.append(["client's use of a core", f"{figures.client_cpu_share:.0%}"])
    return rows


def latency_rows(spreads: Sequence[tuple[str, Spread | None]]) -> Rows:
    """One row for each latency in milliseconds."""
    rows = [["ms", "mean", "p50", "p90", "p95", "p99", "max"]]
    for name, spread in spreads:
        if spread is None:
            rows.append([name, *["–"] * 6])
            continue
        found = (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99, spread.max)
        rows.append([name, *map(_number, found)])
    return rows


def latencies_of(figures: Figures) -> list[tuple[str, Spread | None]]:
    """The latencies of a run by the names that a table gives them."""
    return [(name, getattr(figures, field)) for name, field in LATENCIES]


def sweep_rows(points: Sequence[Point]) -> Rows:
    """One row for each run of a sweep; latencies are milliseconds."""
    head = ["", "completed", "refused", "failed", "requests/s", "output tokens/s"]
    shown = [(name, field, share) for name, field in LATENCIES for share in ("p50", "p99")]
    shown = [entry for entry in shown if entry[1] in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")]
    head += [f"{name} {share}" for name, _, share in shown]
    has_goodput = any(point.figures.goodput is not None for point in points)
    rows = [head + (["goodput/s"] if has_goodput else [])]
    for point in points:
        figures = point.figures
        spreads: list[Spread | None] = [getattr(figures, field) for _, field, _ in shown]
        row = [
            point.label,
            *map(str, (figures.completed, figures.refused, figures.failed)),
            f"{figures.requests_per_s:.2f}",
            f"{figures.output_tokens_per_s:.1f}",
            *(
                _number(None if spread is None else getattr(spread, share))
                for spread, (_, _, share) in zip(spreads, shown, strict=True)
            ),
        ]
        if has_goodput:
            met = figures.goodput
            row.append(_number(None if met is None else met.requests_per_s))
        rows.append(row)
    return rows


def _cache(figures: Figures) -> str:
    if figures.cache_hit_rate is None:
        return "the server does not say"
    return f"{figures.cached_tokens} ({figures.cache_hit_rate:.1%})"


def _number(value: float | None) -> str:
    """Three figures or so, whatever the size."""
    if value is None:
        return "–"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
