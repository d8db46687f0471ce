"""Liveness, readiness and the time before the end: cases 100, 102 and 112 without processes."""

import threading
import time

import httpx
import pytest
from msgspec.structs import replace

from cluster.messages.clients import CancelByLabel, Cancelled, EngineStarting, EngineStopping
from cluster.messages.reports import GroupStatus
from tests.cluster.api.conftest import StartRig
from tests.cluster.api.raw import Raw, head
from tests.cluster.api.rig import ApiRig

READY = (GroupStatus(group=0, epoch=1, state="ready"),)


def in_state(rig: ApiRig, state: str, groups: tuple[GroupStatus, ...] = READY) -> None:
    rig.engine.status = replace(rig.engine.status, state=state, groups=groups)


def probes(rig: ApiRig) -> tuple[int, int]:
    """What /health and /ready say."""
    return rig.http.get("/health").status_code, rig.http.get("/ready").status_code


@pytest.mark.parametrize(
    ("state", "groups", "expected"),
    [
        ("serving", READY, (200, 200)),
        ("serving", (GroupStatus(group=0, epoch=1, state="starting"),), (200, 503)),
        ("starting", (), (200, 503)),
        ("stopping", READY, (200, 503)),
        ("failed", (GroupStatus(group=0, epoch=1, state="lost"),), (503, 503)),
    ],
)
def test_each_state_of_the_engine_means_something_to_each_probe(
    start_rig: StartRig,
    state: str,
    groups: tuple[GroupStatus, ...],
    expected: tuple[int, int],
) -> None:
    rig = start_rig()
    in_state(rig, state, groups)
    assert probes(rig) == expected


def test_case_100_an_engine_that_does_not_answer_is_no_health_and_is_when_it_does_again(
    start_rig: StartRig,
) -> None:
    rig = start_rig(health_timeout_s=0.3)
    in_state(rig, "serving")
    rig.engine.answers_status = False
    began = time.monotonic()
    assert probes(rig) == (503, 503)
    assert time.monotonic() - began >= 0.6
    message = rig.http.get("/health").json()["error"]["message"]
    assert "did not answer within health_timeout_s=0.3" in message

    rig.engine.answers_status = True
    rig.engine.send(rig.engine.status)  # what was asked while it was frozen is answered now
    assert probes(rig) == (200, 200)


def test_many_probes_of_a_frozen_engine_ask_it_once(start_rig: StartRig) -> None:
    rig = start_rig(health_timeout_s=0.3)
    rig.engine.answers_status = False
    asked = rig.engine.num_status_requests
    threads = [threading.Thread(target=httpx.get, args=(f"{rig.url}/health",)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    probes(rig)
    assert rig.engine.num_status_requests == asked + 1


def test_case_102_a_call_before_the_model_is_loaded_is_refused_at_once(
    start_rig: StartRig,
) -> None:
    rig = start_rig(hello_answer=EngineStarting(message="the model is being loaded"))
    in_state(rig, "starting", ())

    assert probes(rig) == (200, 503)
    for path, body in (
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/tokenize", {"prompt": "hi"}),
    ):
        answer = rig.post(path, **body)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "engine_not_ready"
    assert rig.http.get("/v1/models").status_code == 503
    rig.engine.send(rig.engine.info)
    in_state(rig, "serving")
    wait_until(lambda: probes(rig) == (200, 200))
    assert rig.http.get("/v1/models").status_code == 200


def wait_until(is_so) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + 20.0
    while not is_so():
        assert time.monotonic() < deadline


def test_case_112_while_it_drains_new_calls_are_refused_and_sent_elsewhere(
    start_rig: StartRig,
) -> None:
    rig = start_rig()
    in_state(rig, "stopping")
    rig.engine.send(EngineStopping(message="the engine received SIGTERM", drain_s=9.0))
    wait_until(lambda: rig.api.is_leaving)
    body = b'{"prompt": [5]}'
    with Raw(rig.url) as raw:
        json = "Content-Type: application/json"
        raw.send(head("/v1/completions", json, f"Content-Length: {len(body)}") + body)
        answer = raw.answer()
        assert answer is not None
        assert answer.status == 503
        assert answer.headers["retry-after"] == "5"
        assert answer.headers["connection"] == "close"
        assert answer.error()["code"] == "shutting_down"
        assert "received SIGTERM" in str(answer.error()["message"])
        assert raw.is_closed()
    assert probes(rig) == (200, 503)
    assert rig.engine.received.empty()


def test_a_call_is_cancelled_by_its_id_through_the_engine(start_rig: StartRig) -> None:
    rig = start_rig()
    answers: list[httpx.Response] = []

    def cancel(request_id: str, count: int) -> httpx.Response:
        thread = threading.Thread(
            target=lambda: answers.append(rig.post(f"/v1/requests/{request_id}/cancel"))
        )
        thread.start()
        assert rig.engine.received.get(timeout=20) == CancelByLabel(request_id)
        rig.engine.send(Cancelled(request_id, count))
        thread.join()
        return answers[-1]

    done, missed = cancel("cmpl-1", 2), cancel("cmpl-2", 0)
    assert done.json() == {"id": "cmpl-1", "object": "request.cancelled", "cancelled": True}
    assert missed.status_code == 404
    assert missed.json()["error"]["code"] == "request_not_found"


def test_the_version_is_told(start_rig: StartRig) -> None:
    assert start_rig().http.get("/version").json()["version"]
