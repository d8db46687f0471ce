"""`/metrics` of a real server, and of one whose API servers come and go."""

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.api.scripted_serve import write_model
from tests.system.api.serving import Serving

SCRIPTED = (sys.executable, "-m", "tests.cluster.api.scripted_serve")


def metrics_of(http: httpx.Client) -> dict[str, float]:
    """Values by name and labels, as they stand in the text."""
    answer = http.get("/metrics")
    assert answer.status_code == 200
    return {
        f"{sample.name}{json.dumps(sample.labels, sort_keys=True)}": sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


@pytest.mark.model
def test_a_call_on_the_real_model_moves_the_metrics_that_dashboards_show(
    http: httpx.Client,
) -> None:
    before = metrics_of(http)
    http.post("/v1/completions", json={"prompt": "The sea", "max_tokens": 4, "ignore_eos": True})
    after = metrics_of(http)

    def grown(name: str, **labels: str) -> float:
        key = f"{name}{json.dumps(labels, sort_keys=True)}"
        return after[key] - before.get(key, 0.0)

    assert grown("stoker:generation_tokens_total") == 4
    assert grown("stoker:requests_finished_total", reason="length") == 1
    assert grown("stoker:inter_token_seconds_count") == 3
    assert grown("stoker:http_time_to_first_token_seconds_count", route="/v1/completions") == 1
    for phase in ("plan", "wire", "forward", "sample", "apply"):
        assert grown("stoker:step_seconds_count", phase=phase) >= 4
        assert grown("stoker:step_seconds_sum", phase=phase) > 0.0
    forward = grown("stoker:step_seconds_sum", phase="forward")
    assert forward > grown("stoker:step_seconds_sum", phase="plan"), "the model takes longest"
    (model,) = {key.split('"model_name": "')[1].split('"')[0] for key in after if "vllm:" in key}
    assert f'vllm:num_requests_running{{"engine": "0", "model_name": "{model}"}}' in after


@pytest.mark.slow
def test_a_scrape_is_right_whichever_server_answers_it_also_after_one_was_killed() -> None:
    folder = write_model(Path(tempfile.mkdtemp(prefix="stoker-test-")))
    options = ("--max-model-len=256", f"--socket-dir={folder}", "--api-servers=2")
    with Serving(folder, *options, command=SCRIPTED) as serving:
        serving.wait_up()
        labels = {"method": "POST", "route": "/v1/completions", "status": "200"}
        count = f"stoker:http_requests_total{json.dumps(labels)}"

        def call_anew(times: int) -> None:
            for _ in range(times):  # each on a connection of its own, so that both have some
                with serving.http() as http:
                    body = {"prompt": [5, 6], "max_tokens": 2}
                    assert http.post("/v1/completions", json=body).status_code == 200

        def scraped() -> set[float]:
            found = set()
            for _ in range(8):
                with serving.http() as http:
                    found.add(metrics_of(http)[count])
            return found

        call_anew(12)
        assert scraped() == {12.0}
        serving.api_servers[0].kill()
        deadline = time.monotonic() + 30.0
        while len([p for p in serving.api_servers if p.is_running()]) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        call_anew(5)
        assert scraped() == {17.0}
    shutil.rmtree(folder)
