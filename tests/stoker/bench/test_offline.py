"""`stoker bench throughput` and `stoker bench latency`: on a scripted engine, and on the model."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from scheduler.request import Ended, Finish
from stoker.bench.latency_command import LatencyReport
from stoker.bench.peak_memory import PeakMemory, proportional_bytes
from stoker.bench.throughput_command import ThroughputReport
from stoker.cli import main
from tests.cluster.frontend.fake_engine import FakeEngine, answer_at_once, ipc_address, tokens


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    with FakeEngine(ipc_address(tmp_path), script=answer_at_once) as fake:
        yield fake


def test_throughput_counts_the_tokens_of_a_whole_workload(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    workload = ("--random-input-len", "5-9", "--random-output-len", "4", "--num-prompts", "6")

    code = main(
        ["bench", "throughput", "--address", engine.address, *workload, "--json", str(path)]
    )

    assert code == 0
    report = msgspec.json.decode(path.read_bytes(), type=ThroughputReport)
    assert report.summary.requests == 6
    assert report.summary.output_tokens == 24
    assert 30 <= report.summary.prompt_tokens <= 54
    assert report.output_tokens_per_s == pytest.approx(24 / report.summary.wall_s)
    all_tokens = report.summary.prompt_tokens + 24
    assert report.total_tokens_per_s == pytest.approx(all_tokens / report.summary.wall_s)
    assert report.peak_memory_bytes is None
    assert report.latencies.ttft_ms is not None
    assert report.latencies.ttft_ms.count == 6
    printed = capsys.readouterr().out
    for word in ("output tokens/s", "mixed steps", "preemptions", "peak memory", "TPOT"):
        assert word in printed


def test_a_trace_is_answered_with_the_lengths_it_asks_for(
    engine: FakeEngine, tmp_path: Path
) -> None:
    trace = tmp_path / "t.json"
    trace.write_text(json.dumps([{"prompt_token_ids": [5, 6, 7], "max_tokens": n} for n in (2, 5)]))

    assert main(["bench", "throughput", "--address", engine.address, "--trace", str(trace)]) == 0

    asked = [engine.next_request() for _ in range(4)]
    measured = asked[2:]
    assert [request.sampling.max_tokens for request in measured] == [2, 5]
    assert [list(request.prompt) for request in measured] == [[5, 6, 7]] * 2


def test_answers_are_sampled_as_the_model_says_unless_the_user_says_otherwise(
    engine: FakeEngine,
) -> None:
    command = ["bench", "latency", "--address", engine.address, "--input-len", "4"]
    command += ["--output-len", "2", "--num-iters", "1", "--num-iters-warmup", "0"]

    assert main(command) == 0
    assert main([*command, "--temperature", "0.5", "--top-k", "7", "--no-ignore-eos"]) == 0

    plain, asked = engine.next_request().sampling, engine.next_request().sampling
    assert (plain.temperature, plain.top_k, plain.ignore_eos) == (1.0, 0, True)
    assert (asked.temperature, asked.top_k, asked.ignore_eos) == (0.5, 7, False)


def test_latency_measures_batches_of_one_size_with_new_prompts_each(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    sizes = ["--batch-size", "2", "--input-len", "6", "--output-len", "3"]
    rounds = ["--num-iters", "4", "--num-iters-warmup", "1"]

    code = main(
        ["bench", "latency", "--address", engine.address, *sizes, *rounds, "--json", str(path)]
    )

    assert code == 0
    report = msgspec.json.decode(path.read_bytes(), type=LatencyReport)
    assert (report.iterations, report.batch_ms.count) == (4, 4)
    assert report.latencies.e2e_ms is not None
    assert report.latencies.e2e_ms.count == 8
    assert report.latencies.itl_ms is not None
    assert report.latencies.itl_ms.count == 16
    prompts = [tuple(engine.next_request().prompt) for _ in range(10)]
    assert len(set(prompts)) == 10
    assert "4 batches of 2, each with 6 tokens in and 3 out" in capsys.readouterr().out


def test_an_answer_that_failed_is_no_measurement(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.script = lambda request: [
        tokens(
            request.handle,
            [],
            Finish.ERROR,
            ended=(Ended(handle=request.handle, message="a worker died"),),
        )
    ]

    assert main(["bench", "latency", "--address", engine.address, "--input-len", "4"]) == 1
    assert "ended by error: a worker died" in capsys.readouterr().err


def test_conversations_are_for_servers(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t.json"
    trace.write_text(json.dumps([{"messages": [{"role": "user", "content": "hi"}]}]))

    assert main(["bench", "throughput", "--address", engine.address, "--trace", str(trace)]) == 1
    assert "bench serve --endpoint chat" in capsys.readouterr().err


def test_memory_is_sampled_until_the_end_however_short_it_was() -> None:
    with PeakMemory() as peak:
        pass

    assert peak.bytes > proportional_bytes(os.getpid()) / 2


SETTINGS = ["--backend", "local", "--num-kv-blocks", "64", "--max-model-len", "256"]


@pytest.mark.slow
@pytest.mark.model
def test_throughput_of_the_model(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    workload = ["--random-input-len", "20-60", "--random-output-len", "12", "--num-prompts", "8"]

    code = main(["bench", "throughput", str(smollm2), *SETTINGS, *workload, "--json", str(path)])

    assert code == 0
    report = msgspec.json.decode(path.read_bytes(), type=ThroughputReport)
    assert report.summary.output_tokens == 96
    assert report.summary.outputs_by_finish == {"length": 8}
    assert report.summary.cached_tokens == 0
    assert report.summary.steps >= 12
    assert report.peak_memory_bytes is not None
    assert report.peak_memory_bytes > 135e6 * 4, "the weights alone, in float32"
    assert report.output_tokens_per_s > 0


@pytest.mark.slow
@pytest.mark.model
def test_latency_of_the_model(smollm2: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    sizes = ["--batch-size", "2", "--input-len", "16", "--output-len", "8", "--num-iters", "3"]

    assert main(["bench", "latency", str(smollm2), *SETTINGS, *sizes, "--json", str(path)]) == 0

    report = msgspec.json.decode(path.read_bytes(), type=LatencyReport)
    assert report.iterations == 3
    latencies = report.latencies
    assert latencies.ttft_ms is not None
    assert latencies.e2e_ms is not None
    assert latencies.itl_ms is not None
    assert latencies.itl_ms.count == 3 * 2 * 7
    assert 0 < latencies.ttft_ms.p50 < latencies.e2e_ms.p50 <= report.batch_ms.max
