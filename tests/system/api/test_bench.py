"""`stoker bench serve` against the real server with the real model."""

from pathlib import Path

import httpx
import msgspec
import pytest

from stoker import Client
from stoker.bench.report import ServeReport
from stoker.cli import main
from tests.system.api.serving import Serving

pytestmark = [pytest.mark.slow, pytest.mark.model]


def measured(served: Serving, folder: Path, *arguments: str) -> ServeReport:
    path = folder / "report.json"
    where = ("--base-url", served.base_url, "--api-key", served.api_key, "--json", str(path))
    assert main(["bench", "serve", *where, *arguments]) == 0
    return msgspec.json.decode(path.read_bytes(), type=ServeReport)


@pytest.mark.usefixtures("http")
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_the_figures_of_a_run_agree_with_what_the_engine_counted(
    served: Serving, engine_client: Client, tmp_path: Path, endpoint: str
) -> None:
    before = engine_client.status().totals

    report = measured(
        served,
        tmp_path,
        *("--endpoint", endpoint, "--max-concurrency", "4", "--num-prompts", "12"),
        *("--random-input-len", "20-120", "--random-output-len", "4-16", "--ignore-eos"),
    )

    after, figures = engine_client.status().totals, report.runs[0].figures
    assert figures.completed == after.num_requests - before.num_requests == 12
    assert figures.output_tokens == after.output_tokens - before.output_tokens
    assert figures.prompt_tokens == after.prompt_tokens - before.prompt_tokens
    assert figures.cached_tokens == after.cached_tokens - before.cached_tokens
    assert figures.ended_early == figures.without_usage == 0
    assert figures.peak_concurrency == 4
    assert figures.ttft_ms is not None
    assert figures.e2e_ms is not None
    assert 0 < figures.ttft_ms.p50 < figures.e2e_ms.p50


def test_a_second_run_of_one_seed_is_cold_and_a_repeated_one_is_warm(
    served: Serving, http: httpx.Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ("--max-concurrency", "2", "--num-prompts", "4", "--random-input-len", "100")
    load += ("--random-output-len", "4", "--ignore-eos")
    hit_rates, warned = [], []
    for more in ((), (), ("--reuse-prompts",), ("--reuse-prompts",)):
        report = measured(served, tmp_path, *load, *more)
        hit_rates.append(report.runs[0].figures.cache_hit_rate)
        warned.append("prefix cache" in capsys.readouterr().err)

    assert hit_rates[:3] == [0.0, 0.0, 0.0]
    assert hit_rates[3] is not None
    assert hit_rates[3] > 0.9
    assert warned == [False, False, False, True]
