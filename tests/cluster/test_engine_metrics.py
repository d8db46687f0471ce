"""The engine core asked for its counts, over its own socket."""

from pathlib import Path

import pytest

from cluster import engine as engine_module
from cluster.messages.clients import ClientHello, EngineStarting
from cluster.messages.reports import EngineMetrics, MetricsRequest
from cluster.metrics import ENGINE
from cluster.wire import PROTOCOL_VERSION
from tests.cluster.cluster_rig import Rig, TestClient


def metrics_of(client: TestClient) -> EngineMetrics:
    client.send(MetricsRequest())
    return client.next_of(EngineMetrics)


def value(metrics: EngineMetrics, name: str, *labels: str) -> float:
    (found,) = [sample.value for sample in metrics.values[name] if sample.labels == labels]
    return found


def count(metrics: EngineMetrics, name: str, *labels: str) -> int:
    (found,) = [each for each in metrics.distributions[name] if each.labels == labels]
    return sum(found.counts)


def test_what_a_request_took_is_counted_once_in_each_place(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.start_worker()
        client = rig.client()
        client.finish(client.submit(num_prompt=20, max_tokens=5))
        metrics = metrics_of(client)

    assert metrics.values.keys() | metrics.distributions == {family.name for family in ENGINE}
    assert value(metrics, "requests_accepted") == 1
    assert value(metrics, "requests_finished", "length") == 1
    assert value(metrics, "prompt_tokens") == 20
    assert value(metrics, "tokens", "prefill") == 20
    assert value(metrics, "generation_tokens") == 5
    assert value(metrics, "steps", "prefill") == 1
    assert value(metrics, "groups_ready") == 1
    assert value(metrics, "prefix_cache_queried_tokens") == 20
    for name in ("time_to_first_token_seconds", "request_seconds", "request_queue_seconds"):
        assert count(metrics, name) == 1
    assert count(metrics, "inter_token_seconds") == 4
    for phase in ("plan", "wire", "forward", "sample", "apply"):
        assert count(metrics, "step_seconds", phase) == count(metrics, "step_all_tokens") >= 5


def test_refusals_are_counted_by_reason_wherever_they_are_made(tmp_path: Path) -> None:
    with Rig(tmp_path, max_waiting_requests=1, max_num_seqs=1) as rig:
        rig.start_worker()
        client = rig.client()
        handles = [client.submit(num_prompt=4, max_tokens=100) for _ in range(20)]
        handles.append(client.submit(num_prompt=5000))
        client.finish(*handles)
        metrics = metrics_of(client)
        full = [r for r in client.rejections.values() if r.reason == "queue_full"]

    assert value(metrics, "requests_refused", "too_long") == 1
    assert value(metrics, "requests_refused", "queue_full") == len(full) > 0
    assert all(r.retry_after_s is not None and r.retry_after_s >= 1 for r in full)
    assert all(r.retry_after_s == int(r.retry_after_s) for r in full if r.retry_after_s)


def test_there_is_an_answer_while_no_worker_is_ready(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        client = rig.stranger()
        client.send(ClientHello(protocol=PROTOCOL_VERSION))
        client.next_of(EngineStarting)
        metrics = metrics_of(client)

    assert value(metrics, "engine_up") == 1
    assert value(metrics, "groups_ready") == 0
    assert count(metrics, "time_to_first_token_seconds") == 0


def test_case_99_metrics_that_cannot_be_built_do_not_end_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> EngineMetrics:
        raise ValueError("a counter fell")

    monkeypatch.setattr(engine_module, "build_metrics", fail)
    with Rig(tmp_path) as rig:
        rig.start_worker()
        client = rig.client()
        assert metrics_of(client).values == {}
        handle = client.submit(max_tokens=3)
        client.finish(handle)
        assert len(client.tokens[handle]) == 3
