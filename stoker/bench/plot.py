"""Plots of runs as PNG files; the only place that loads matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from stoker.bench.errors import BenchError
from stoker.bench.figures import token_gaps
from stoker.bench.load import is_ok
from stoker.bench.record import Record
from stoker.bench.report import Point
from stoker.spread import Spread


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
                axis.annotate(point.label, (rate, spread.p99), fontsize=7, rotation=30)
        axis.set(title=title, xlabel="output tokens/s", ylabel="ms", ylim=(0, None))
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
    began_s = min((record.due_s for record in records), default=0.0)
    rows = range(len(good))
    due = [r.due_s - began_s for r in good]
    first = [(r.end_s if r.first_s is None else r.first_s) - began_s for r in good]
    end = [r.end_s - began_s for r in good]
    axes[2].hlines(rows, due, first, color="tab:orange", label="until the first token")
    axes[2].hlines(rows, first, end, color="tab:blue", label="streaming")
    bad = [record for record in records if not is_ok(record)]
    axes[2].plot([r.end_s - began_s for r in bad], [-1] * len(bad), "rx", label="failed or refused")
    axes[2].set(title="requests over time", xlabel="s", ylabel="request")
    axes[2].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    _pyplot().close(figure)


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
