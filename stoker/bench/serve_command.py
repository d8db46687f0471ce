"""`stoker bench serve`: measure a running server as its users see it."""

import argparse
import asyncio
import json
import resource
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from time import monotonic

import msgspec

from stoker.bench.errors import BenchError
from stoker.bench.http_client import HttpClient
from stoker.bench.machine import machine_line
from stoker.bench.report import (
    Point,
    ServeReport,
    count_rows,
    latencies_of,
    latency_rows,
    sweep_rows,
    write_json,
)
from stoker.bench.request_form import CHAT, RequestForm
from stoker.bench.serve_plan import ServePlan, Tempo, measure
from stoker.bench.tables import show_table
from stoker.bench.trace import read_conversations, read_trace
from stoker.bench.workload import Call, MadeUp, Recorded, Synthetic, Workload
from stoker.cli import EXIT_FAILED, EXIT_OK
from stoker.prompts_file import read_prompts

ASK_TIMEOUT_S = 30.0
"""For the server's list of models."""
SENT_FIELDS = ("temperature", "top_p", "top_k", "ignore_eos")


def bench_serve(arguments: argparse.Namespace) -> int:
    """Run the command; fails if too many requests of a run did."""
    if arguments.plot:
        from stoker.bench.plot import require_matplotlib

        require_matplotlib()
    _allow_many_sockets()
    workload, fields = workload_of(arguments), fields_of(arguments)
    report, points = asyncio.run(_measure(arguments, workload, fields))
    if arguments.json != "-":
        _show(report, points)
    if arguments.json:
        write_json(report, arguments.json)
    if arguments.plot:
        _plot(points, Path(arguments.plot))
    worst = max(point.figures.failure_share for point in points)
    if worst > arguments.max_failures:
        print(
            f"stoker: error: {worst:.1%} of the requests of a run failed or were refused, more "
            f"than --max-failures {arguments.max_failures:g}",
            file=sys.stderr,
        )
        return EXIT_FAILED
    return EXIT_OK


def workload_of(arguments: argparse.Namespace) -> Workload:
    """What the arguments ask to be sent."""
    made_of = MadeUp(
        arguments.random_text or arguments.endpoint == CHAT, arguments.random_token_ids
    )
    if arguments.trace:
        entries = [entry.as_call for entry in read_trace(Path(arguments.trace))]
        return Recorded(entries=entries, name=arguments.trace, made_of=made_of)
    if arguments.sharegpt:
        entries = read_conversations(Path(arguments.sharegpt), max_tokens=arguments.max_tokens)
        return Recorded(entries=entries, name=arguments.sharegpt, made_of=made_of)
    if arguments.prompts_file:
        prompts = read_prompts(arguments.prompts_file)
        entries = [Call(prompt, arguments.max_tokens) for prompt in prompts]
        if not entries:
            raise BenchError(f"{arguments.prompts_file} holds no prompt")
        return Recorded(entries=entries, name=arguments.prompts_file, made_of=made_of)
    return Synthetic(
        input_len=arguments.random_input_len,
        output_len=arguments.random_output_len,
        prefix_len=arguments.random_prefix_len,
        num_prefixes=arguments.random_num_prefixes,
        made_of=made_of,
        repeats=arguments.reuse_prompts,
    )


def fields_of(arguments: argparse.Namespace) -> dict[str, object]:
    """The fields of the body that the user set."""
    try:
        extra = json.loads(arguments.extra_body)
    except ValueError as error:
        raise BenchError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(extra, dict):
        raise BenchError(f"--extra-body must be a JSON object, not {arguments.extra_body}")
    given = {name: value for name, value in vars(arguments).items() if name in SENT_FIELDS}
    return given | extra


def tempos_of(arguments: argparse.Namespace) -> list[Tempo]:
    """One for each run."""
    limit = arguments.max_concurrency
    if arguments.sweep_rate:
        return [Tempo(request_rate=rate, max_concurrency=limit) for rate in arguments.sweep_rate]
    if arguments.sweep_concurrency:
        rate = arguments.request_rate
        counts = arguments.sweep_concurrency
        return [Tempo(request_rate=rate, max_concurrency=count) for count in counts]
    return [Tempo(request_rate=arguments.request_rate, max_concurrency=limit)]


def plan_of(arguments: argparse.Namespace, workload: Workload, form: RequestForm) -> ServePlan:
    return ServePlan(
        form=form,
        workload=workload,
        tempos=tempos_of(arguments),
        num_prompts=arguments.num_prompts,
        duration_s=arguments.duration,
        burstiness=arguments.burstiness,
        timeout_s=arguments.timeout,
        num_warmups=arguments.num_warmups,
        seed=arguments.seed,
        is_salted=arguments.cache_salt,
        objectives_ms=dict(arguments.goodput) or None,
        expects_cache=arguments.expect_cache or arguments.random_prefix_len > 0,
        keeps_requests=arguments.detailed or bool(arguments.plot),
    )


async def _measure(
    arguments: argparse.Namespace, workload: Workload, fields: Mapping[str, object]
) -> tuple[ServeReport, list[Point]]:
    """The report, and its runs with every request if the arguments need them."""
    url = arguments.base_url.rstrip("/").removesuffix("/v1")
    client = HttpClient(url, headers=_headers(arguments), clock=monotonic)
    try:
        model = await _model_of(client, url, arguments.model)
        form = RequestForm(arguments.endpoint, model, fields)
        plan = plan_of(arguments, workload, form)
        sample = form.shown(next(workload.calls(plan.seed, "sample")))
        shown = json.dumps(sample, ensure_ascii=False)
        print(f"sends to {url}{form.path}: {shown}", file=sys.stderr)
        points = await measure(
            plan, partial(client.post, form.path), monotonic, shows_progress=arguments.progress
        )
    finally:
        client.close()
    runs = points
    if not arguments.detailed:
        runs = [msgspec.structs.replace(point, requests=None) for point in points]
    report = ServeReport(
        machine=machine_line(),
        url=f"{url}{form.path}",
        model=model,
        workload=str(workload),
        seed=plan.seed,
        request=sample,
        runs=runs,
    )
    return report, points


def _headers(arguments: argparse.Namespace) -> dict[str, str]:
    headers = {"accept": "text/event-stream, application/json"}
    if arguments.api_key:
        headers["authorization"] = f"Bearer {arguments.api_key}"
    for line in arguments.header:
        name, colon, value = line.partition(":")
        if not colon or not name.strip() or "\n" in line or "\r" in line:
            raise BenchError(f"--header {line!r} is not of the form 'NAME: VALUE'")
        headers[name.strip().lower()] = value.strip()
    return headers


async def _model_of(client: HttpClient, url: str, wanted: str | None) -> str:
    """The model to ask for; also shows that the server is there and takes the key.

    Raises:
        BenchError: it is not, or lists no model.
    """
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            status, body = await client.get("/v1/models")
    except TimeoutError:
        raise BenchError(f"the server at {url} does not answer in {ASK_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise BenchError(f"no server answers at {url}: {error}. Name one with --base-url") from None
    if status == 401:
        raise BenchError(f"the server at {url} refuses the key; give one with --api-key")
    if wanted is not None:
        return wanted
    try:
        return str(json.loads(body if status == 200 else b"")["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise BenchError(
            f"the server at {url} lists no model (HTTP {status} from /v1/models); give --model"
        ) from None


def _allow_many_sockets() -> None:
    """As many as this process may have: each request under way needs one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _show(report: ServeReport, points: list[Point]) -> None:
    print(
        f"{report.machine}\n{report.url}, model {report.model}\n{report.workload}, seed "
        f"{report.seed}\n"
    )
    if len(points) > 1:
        show_table(sweep_rows(points))
    else:
        show_table(count_rows(points[0]))
        show_table(latency_rows(latencies_of(points[0].figures)))
    for point in points:
        where = f"{point.label}: " if len(points) > 1 else ""
        for reason, example in point.figures.failure_examples.items():
            print(f"stoker: {where}{reason}: {example}", file=sys.stderr)
        for warning in point.warnings:
            print(f"stoker: warning: {where}{warning}", file=sys.stderr)


def _plot(points: list[Point], path: Path) -> None:
    from stoker.bench.plot import plot_run, plot_sweep

    if len(points) > 1:
        plot_sweep(points, path)
    else:
        plot_run(points[0].requests or [], path)
    print(f"plot: {path}", file=sys.stderr)
