"""`stoker bench latency`: batches of one size, one after the other, each alone."""

import argparse
from itertools import islice
from secrets import token_hex

from msgspec import Struct

from scheduler.sampling import SamplingParams
from stoker.bench.lengths import LengthMix
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
from stoker.bench.workload import Synthetic
from stoker.cli import EXIT_OK
from stoker.client import Client
from stoker.cluster_argument import cluster_of
from stoker.spread import Spread, spread_of


class LatencyReport(Struct, frozen=True, kw_only=True):
    """What `stoker bench latency --json` writes."""

    format: int = FORMAT
    machine: str
    model: str
    batch_size: int
    input_len: int
    output_len: int
    iterations: int
    seed: int
    sampling: SamplingParams
    batch_ms: Spread
    """From handing a batch over to its last answer."""
    latencies: OfflineLatencies
    """Of the single requests."""


def bench_latency(arguments: argparse.Namespace) -> int:
    """Run the command."""
    with cluster_of(arguments) as client:
        sampling = sampling_asked(arguments, client)
        batches = _batches(arguments, client, sampling)
    spread = spread_of(1e3 * batch.wall_s for batch in batches)
    assert spread is not None, "there is at least one iteration"
    report = LatencyReport(
        machine=machine_line(),
        model=batches[-1].after.model,
        batch_size=arguments.batch_size,
        input_len=arguments.input_len,
        output_len=arguments.output_len,
        iterations=len(batches),
        seed=arguments.seed,
        sampling=sampling,
        batch_ms=spread,
        latencies=latencies_of(output for batch in batches for output in batch.outputs),
    )
    if arguments.json != "-":
        _show(report)
    if arguments.json:
        write_json(report, arguments.json)
    return EXIT_OK


def _batches(
    arguments: argparse.Namespace, client: Client, sampling: SamplingParams
) -> list[Batch]:
    """Those that are measured, each with prompts of its own."""
    size, num_warmups = arguments.batch_size, arguments.num_iters_warmup
    calls = Synthetic(
        input_len=LengthMix(((arguments.input_len, arguments.input_len),)),
        output_len=LengthMix(((arguments.output_len, arguments.output_len),)),
        made_of=made_of_vocabulary(client),
    ).calls(arguments.seed, token_hex(8))
    batches = [
        run_batch(client, list(islice(calls, size)), sampling)
        for _ in range(num_warmups + arguments.num_iters)
    ]
    return batches[num_warmups:]


def _show(report: LatencyReport) -> None:
    print(
        f"{report.machine}\nmodel {report.model}\n{report.iterations} batches of "
        f"{report.batch_size}, each with {report.input_len} tokens in and {report.output_len} "
        f"out, seed {report.seed}\n"
    )
    show_table(latency_rows([("batch", report.batch_ms), *report.latencies.named()]))
