"""`stoker bench throughput`: a whole workload at once, as fast as the cluster can."""

import argparse
import sys
from itertools import islice
from pathlib import Path
from secrets import token_hex

from msgspec import Struct

from scheduler.sampling import SamplingParams
from stoker.bench.figures import WARM_SHARE
from stoker.bench.machine import machine_line
from stoker.bench.offline import (
    Batch,
    OfflineLatencies,
    latencies_of,
    made_of_vocabulary,
    run_batch,
    sampling_asked,
)
from stoker.bench.report import FORMAT, latency_rows, write_json
from stoker.bench.tables import show_table
from stoker.bench.trace import read_trace
from stoker.bench.workload import MadeUp, Recorded, Synthetic, Workload, short_calls
from stoker.cli import EXIT_OK
from stoker.cluster_argument import cluster_of
from stoker.progress import answers_bar
from stoker.summary import Summary, summary_of

NUM_SYNTHETIC = 100
"""Requests, unless the user says how many."""
NUM_WARMUPS = 2
"""Short requests before the measured ones."""


class ThroughputReport(Struct, frozen=True, kw_only=True):
    """What `stoker bench throughput --json` writes."""

    format: int = FORMAT
    machine: str
    model: str
    workload: str
    seed: int
    sampling: SamplingParams
    """`max_tokens` is each request's own."""
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    peak_memory_bytes: int | None
    """Of the cluster and its client; None: a cluster that runs elsewhere."""
    summary: Summary
    latencies: OfflineLatencies


def bench_throughput(arguments: argparse.Namespace) -> int:
    """Run the command."""
    entries = read_trace(Path(arguments.trace)) if arguments.trace else []
    with cluster_of(arguments) as client:
        sampling = sampling_asked(arguments, client)
        made_of = made_of_vocabulary(client, arguments.random_token_ids)
        workload: Workload
        if entries:
            calls = [entry.as_call for entry in entries]
            workload = Recorded(entries=calls, name=arguments.trace, made_of=made_of)
        else:
            workload = _synthetic(arguments, made_of)
        count = arguments.num_prompts or len(entries) or NUM_SYNTHETIC
        run_id = token_hex(8)
        run_batch(client, short_calls(made_of, arguments.seed, run_id, NUM_WARMUPS), sampling)
        calls = list(islice(workload.calls(arguments.seed, run_id), count))
        with answers_bar(count, is_wanted=arguments.progress) as tell:
            batch = run_batch(client, calls, sampling, on_answer=tell)
    report = _report(arguments, batch, str(workload), sampling)
    if arguments.json != "-":
        _show(report, expects_cache=arguments.random_prefix_len > 0)
    if arguments.json:
        write_json(report, arguments.json)
    return EXIT_OK


def _synthetic(arguments: argparse.Namespace, made_of: MadeUp) -> Synthetic:
    return Synthetic(
        input_len=arguments.random_input_len,
        output_len=arguments.random_output_len,
        prefix_len=arguments.random_prefix_len,
        num_prefixes=arguments.random_num_prefixes,
        made_of=made_of,
        repeats=arguments.reuse_prompts,
    )


def _report(
    arguments: argparse.Namespace, batch: Batch, workload: str, sampling: SamplingParams
) -> ThroughputReport:
    summary = summary_of(batch.outputs, batch.before, batch.after, batch.wall_s)
    return ThroughputReport(
        machine=machine_line(),
        model=batch.after.model,
        workload=workload,
        seed=arguments.seed,
        sampling=sampling,
        requests_per_s=summary.requests / batch.wall_s,
        output_tokens_per_s=summary.output_tokens / batch.wall_s,
        total_tokens_per_s=(summary.prompt_tokens + summary.output_tokens) / batch.wall_s,
        peak_memory_bytes=None if arguments.address else batch.peak_bytes,
        summary=summary,
        latencies=latencies_of(batch.outputs),
    )


def _show(report: ThroughputReport, *, expects_cache: bool) -> None:
    print(f"{report.machine}\nmodel {report.model}\n{report.workload}, seed {report.seed}\n")
    summary, peak = report.summary, report.peak_memory_bytes
    rows = [
        ("duration, s", f"{summary.wall_s:.2f}"),
        ("requests/s", f"{report.requests_per_s:.2f}"),
        ("output tokens/s", f"{report.output_tokens_per_s:.1f}"),
        ("all tokens/s", f"{report.total_tokens_per_s:.1f}"),
        ("peak memory, MiB", "–" if peak is None else f"{peak / 2**20:.0f}"),
    ]
    known = {"requests", "prompt tokens", "tokens from cache", "output tokens", "steps"}
    known |= {"mixed steps", "preemptions", "blocks used of all"}
    rows += [row for row in summary.rows() if row[0] in known]
    show_table([["", "value"], *map(list, rows)])
    show_table(latency_rows(report.latencies.named()))
    share = summary.cached_tokens / max(1, summary.prompt_tokens)
    if share > WARM_SHARE and not expects_cache:
        print(
            f"stoker: warning: {share:.0%} of the prompt tokens came from the prefix cache; "
            "--no-enable-prefix-caching measures without",
            file=sys.stderr,
        )
