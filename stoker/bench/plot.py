"""Plots of runs as PNG files; the only place that loads matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from stoker.bench.errors import BenchError
from stoker.bench.figures import token_gaps
from stoker.bench.load import is_ok
from stoker.bench.record import Record
from stoker.bench.report import Point
from stoker.spread import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class NoPlots(BenchError):
    """matplotlib is not installed."""


def require_matplotlib() -> None:
    """Fail at once, not after the measurement.

    Raises:
        NoPlots: it is not installed.
    """
    _pyplot()


def plot_sweep(points: Sequence[Point], path: Path) -> None:
    """Throughput against latency: one line for each percentile, one mark for each run."""
    figure, axes = _pyplot().subplots(1, 3, figsize=(15, 4.5))
    rates = [point.figures.output_tokens_per_s for point in points]
    for axis, name, title in (
        (axes[0], "ttft_ms", "time to first token"),
        (axes[1], "tpot_ms", "time per output token"),
        (axes[2], "e2e_ms", "end to end"),
    ):
        spreads: list[Spread | None] = [getattr(point.figures, name) for point in points]
        for percent in ("p50", "p90", "p99"):
            values = [getattr(spread, percent) if spread else None for spread in spreads]
            there = [(x, y) for x, y in zip(rates, values, strict=True) if y is not None]
            axis.plot([x for x, _ in there], [y for _, y in there], marker="o", label=percent)
        for rate, spread, point in zip(rates, spreads, points, strict=True):
            if spread is not None:
                axis.annotate(
                    point.label,
                    (rate, spread.p99),
                    xytext=(0, 6),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8,
                )
        axis.margins(x=0.12, y=0.1)
        axis.set(title=title, xlabel="output tokens/s", ylabel="ms")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    _pyplot().close(figure)


def plot_run(records: Sequence[Record], path: Path) -> None:
    """One run: how latencies spread, and when which request waited and streamed."""
    good = sorted((record for record in records if is_ok(record)), key=lambda r: r.due_s)
    figure, axes = _pyplot().subplots(1, 3, figsize=(15, 4.5))
    itls = [(1e3 * gap, weight) for r in good for gap, weight in token_gaps(r)]
    ttfts = [(1e3 * r.ttft_s, 1.0) for r in good if r.ttft_s is not None]
    for axis, values, title in (
        (axes[0], ttfts, "time to first token"),
        (axes[1], itls, "time between tokens"),
    ):
        values.sort()
        total, reached, shares = sum(weight for _, weight in values), 0.0, []
        for _, weight in values:
            reached += weight
            shares.append(reached / total)
        axis.step([value for value, _ in values], shares, where="post")
        axis.set(title=title, xlabel="ms", ylabel="share that is no longer", ylim=(0, 1))
        axis.grid(alpha=0.3)
    _draw_timeline(axes[2], good, [record for record in records if not is_ok(record)])
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    _pyplot().close(figure)


def _draw_timeline(axis: "Axes", good: Sequence[Record], bad: Sequence[Record]) -> None:
    """A line for each whole answer, in the order of their arrival, and a mark for each failure."""
    began_s = min((record.due_s for record in (*good, *bad)), default=0.0)
    rows = range(len(good))
    first = [(r.end_s if r.first_s is None else r.first_s) - began_s for r in good]
    axis.hlines(rows, [r.due_s - began_s for r in good], first, color="tab:orange", label="waiting")
    axis.hlines(rows, first, [r.end_s - began_s for r in good], color="tab:blue", label="streaming")
    if bad:
        ends = [record.end_s - began_s for record in bad]
        axis.plot(ends, [-1] * len(bad), "rx", label="failed or refused")
    axis.set(title="requests over time", xlabel="s", ylabel="request")
    axis.legend(loc="lower right")


def _pyplot() -> ModuleType:
    try:
        import matplotlib
    except ImportError as error:
        raise NoPlots(
            "--plot needs matplotlib, which is not installed: pip install 'stoker[plot]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
