"""`/metrics` as Prometheus reads it, and the dashboard that reads it."""

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families as read_text

from cluster.api.api_metrics import ApiMetrics
from cluster.engine_metrics import build_metrics
from cluster.messages.reports import EngineMetrics, GroupStatus, Status, Totals
from cluster.metrics import ENGINE, HTTP
from cluster.recovery import Recoveries
from scheduler.meter import Meter
from tests.cluster.api.rig import ApiRig
from tests.scheduler.builders import Bench, make_request

ROOT = Path(__file__).resolve().parents[3]
NAMES = Path(__file__).with_name("metric_names.txt")


def of_some_work() -> EngineMetrics:
    """After a few requests, one refused, and a preemption."""
    bench = Bench(num_blocks=8, max_num_seqs=4, max_waiting_requests=4)
    for handle in range(5):
        bench.submit(make_request(handle, prompt=6, max_tokens=12))
    bench.run()
    stats = bench.scheduler.stats()
    status = Status(
        engine_id="e",
        model="tiny",
        state="serving",
        uptime_s=3.5,
        num_clients=2,
        groups=(GroupStatus(group=0, epoch=1, state="ready", num_blocks=8, num_used_blocks=2),),
        totals=Totals(
            num_requests=stats.accepted,
            finished=stats.finished,
            output_tokens=stats.output_tokens,
            prefill_tokens=stats.prefill_tokens,
            num_preemptions=stats.preemptions,
        ),
    )
    return build_metrics(
        status,
        stats,
        bench.scheduler.meter,
        {"shutting_down": 1},
        {"load": 0.5, "serve": 0.25},
        Recoveries(),
    )


def text_of(engine: EngineMetrics | None) -> str:
    return ApiMetrics().render(engine).decode()


def series(metrics: Iterable[Metric]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for metric in metrics
        for sample in metric.samples
    }


def value(text: str, name: str, **labels: str) -> float:
    return series(read_text(text))[name, frozenset(labels.items())]


def test_names_and_types_are_those_that_dashboards_were_made_for() -> None:
    """To add a metric, add it to the file. Never change or remove a line of it."""
    found = re.findall(r"(?m)^# TYPE (.+)$", text_of(of_some_work()))

    assert sorted(found) == NAMES.read_text(encoding="utf-8").splitlines()


def test_the_engine_answers_every_family_with_its_own_labels_and_buckets() -> None:
    metrics = of_some_work()
    assert {family.name for family in ENGINE} == metrics.values.keys() | metrics.distributions
    for family in ENGINE:
        for sample in metrics.values.get(family.name, ()):
            assert len(sample.labels) == len(family.labels)
        for each in metrics.distributions.get(family.name, ()):
            assert len(each.labels) == len(family.labels)
            assert len(each.counts) == len(family.bounds) + 1


def test_prometheus_own_parser_accepts_it() -> None:
    names = {metric.name for metric in read_text(text_of(of_some_work()))}

    assert {f"stoker:{family.name}" for family in ENGINE} <= names
    assert {f"vllm:{family.vllm}" for family in ENGINE if family.vllm} <= names


@pytest.mark.parametrize("accept", ["*/*", "application/openmetrics-text;version=1.0.0,*/*;q=0.1"])
def test_names_are_the_same_whatever_format_is_asked_for(rig: ApiRig, accept: str) -> None:
    answer = rig.http.get("/metrics", headers={"accept": accept})

    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "\nstoker:engine_up " in answer.text


def test_figures_are_those_of_the_engine_under_both_names() -> None:
    text = text_of(of_some_work())

    assert value(text, "stoker:requests_finished_total", reason="length") == 4.0
    assert value(text, "stoker:requests_refused_total", reason="queue_full") == 1.0
    assert value(text, "stoker:requests_refused_total", reason="shutting_down") == 1.0
    assert value(text, "stoker:kv_cache_usage_ratio") == 0.25
    vllm = {"model_name": "tiny", "engine": "0"}
    assert value(text, "vllm:kv_cache_usage_perc", **vllm) == 0.25
    assert value(text, "vllm:request_success_total", finished_reason="length", **vllm) == 4.0
    assert value(text, "vllm:generation_tokens_total", **vllm) == 48.0
    assert value(text, "vllm:time_to_first_token_seconds_count", **vllm) == 4.0
    assert value(text, "vllm:inter_token_latency_seconds_count", **vllm) == 44.0
    assert value(text, "stoker:preemptions_total") > 0.0


def test_every_metric_of_the_dashboard_exists() -> None:
    text = text_of(of_some_work())
    exposed = set(re.findall(r"(?m)^(stoker:\w+)", text))
    for kind, suffixes in (("histogram", ("_bucket", "_sum", "_count")), ("counter", ("_total",))):
        exposed |= {f"stoker:{f.name}{end}" for f in HTTP if f.kind == kind for end in suffixes}
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text(encoding="utf-8"))
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
        for name in re.findall(r"\b((?:stoker|vllm):\w+)", target["expr"])
    }

    assert len(asked) > 25
    assert asked <= exposed
    variables = {each["name"] for each in dashboard["templating"]["list"]}
    assert variables == {"datasource", "instance"}


def test_calls_are_counted_by_route_and_status_whatever_else_is_asked(rig: ApiRig) -> None:
    def calls(route: str, status: str, method: str = "POST") -> float:
        found = series(read_text(rig.http.get("/metrics").text))
        labels = {"route": route, "method": method, "status": status}
        return found.get(("stoker:http_requests_total", frozenset(labels.items())), 0.0)

    before = calls("/v1/completions", "200"), calls("other", "404", "GET")
    rig.post("/v1/completions", model=rig.api.info.model, prompt="a", max_tokens=3)
    rig.post("/v1/completions", model=rig.api.info.model, prompt="a", max_tokens=-3)
    for path in range(30):
        rig.http.get(f"/no/such/{path}")

    assert calls("/v1/completions", "200") == before[0] + 1
    assert calls("/v1/completions", "400") >= 1
    assert calls("other", "404", "GET") == before[1] + 30


def test_the_first_token_of_a_call_is_timed_over_http(rig: ApiRig) -> None:
    def count() -> float:
        found = series(read_text(rig.http.get("/metrics").text))
        labels = frozenset({("route", "/v1/completions")})
        return found.get(("stoker:http_time_to_first_token_seconds_count", labels), 0.0)

    before = count()
    rig.post("/v1/completions", model=rig.api.info.model, prompt="a", max_tokens=3)
    assert count() == before + 1


def test_without_an_answer_of_the_engine_the_rest_is_there_and_says_so() -> None:
    text = text_of(None)

    assert value(text, "stoker:engine_up") == 0.0
    assert "vllm:" not in text


_PROCESS = """
import sys
from types import SimpleNamespace
from cluster.api.api_metrics import ApiMetrics
metrics = ApiMetrics(sys.argv[1])
metrics.routes = {"/x"}
for _ in range(int(sys.argv[2])):
    metrics.observe(SimpleNamespace(
        route="/x", path="/x", method="GET", status=200, seconds=0.003, call=None))
print(metrics.render(None).decode())
"""


def test_several_servers_count_together_also_for_one_that_has_ended(tmp_path: Path) -> None:
    for number, total in ((3, 3.0), (4, 7.0)):
        done = subprocess.run(
            [sys.executable, "-c", _PROCESS, str(tmp_path), str(number)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert (
            value(done.stdout, "stoker:http_requests_total", route="/x", method="GET", status="200")
            == total
        )
        assert (
            value(done.stdout, "stoker:http_request_seconds_bucket", route="/x", le="0.005")
            == total
        )


def test_what_was_never_measured_is_zero_not_missing() -> None:
    status = Status(engine_id="e", model="tiny", state="starting", uptime_s=0.1)
    text = text_of(build_metrics(status, None, Meter(), {}, {}, Recoveries()))

    assert value(text, "stoker:requests_refused_total", reason="queue_full") == 0.0
    assert value(text, "stoker:steps_total", mix="mixed") == 0.0
    assert value(text, "stoker:step_seconds_count", phase="forward") == 0.0
