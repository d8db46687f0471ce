"""What the routes that change a cluster ask the engine, and what they make of its answer."""

import threading

import httpx

from cluster.messages.changes import (
    ClusterUpgraded,
    DrainNode,
    ModelReloaded,
    NodeDrained,
    ReloadModel,
    Scaled,
    ScaleGroups,
    UpgradeCluster,
)
from cluster.messages.sockets import FromClient, ToClient
from tests.cluster.api.conftest import StartRig
from tests.cluster.api.rig import ApiRig

UPGRADED = {"object": "cluster.upgraded", "phase": "idle", "num_done": 1, "failure": "it broke"}
RELOADED = {
    "object": "model.reloaded",
    "model_dir": "/b",
    "is_running": True,
    "num_groups": 2,
    "num_done": 1,
    "failure": None,
}
CASES: dict[str, tuple[object, FromClient, ToClient, int, dict[str, object]]] = {
    "POST /admin/scale": (
        {"num_groups": 3},
        ScaleGroups(3),
        Scaled(num_groups=3),
        200,
        {"object": "cluster.scaled", "num_groups": 3, "is_automatic": False},
    ),
    "POST /admin/drain": (
        {"node": "n1"},
        DrainNode("n1"),
        NodeDrained(nodes=("n1",), num_leaving=1, waits_for="a group"),
        200,
        {
            "object": "node.drained",
            "node": "n1",
            "groups_leaving": 1,
            "waits_for": "a group",
            "drained_nodes": ["n1"],
        },
    ),
    "POST /admin/reload": (
        {"model": "b"},
        ReloadModel(model="b"),
        ModelReloaded(model_dir="/b", is_running=True, num_groups=2, num_done=1),
        202,
        RELOADED,
    ),
    "GET /admin/reload": (
        None,
        ReloadModel(only_asks=True),
        ModelReloaded(model_dir="/b", is_running=True, num_groups=2, num_done=1),
        200,
        RELOADED,
    ),
    "POST /admin/upgrade": (
        None,
        UpgradeCluster(),
        ClusterUpgraded(phase="idle", failure="it broke", num_done=1),
        202,
        UPGRADED,
    ),
    "GET /admin/upgrade": (
        None,
        UpgradeCluster(only_asks=True),
        ClusterUpgraded(phase="idle", failure="it broke", num_done=1),
        200,
        UPGRADED,
    ),
}
REFUSALS: dict[str, tuple[object, ToClient]] = {
    "scale": ({"num_groups": 3}, Scaled(num_groups=1, refusal="no")),
    "drain": ({"node": "n1"}, NodeDrained(refusal="no")),
    "reload": ({}, ModelReloaded(refusal="no")),
    "upgrade": (None, ClusterUpgraded(phase="idle", refusal="no")),
}


def called(
    rig: ApiRig, route: str, body: object, answer: ToClient
) -> tuple[FromClient, httpx.Response]:
    """What the engine is asked by one call, and what the caller gets when it has answered."""
    method, path = route.split()
    responses: list[httpx.Response] = []

    def call() -> None:
        responses.append(rig.http.request(method, path, json=body))

    thread = threading.Thread(target=call)
    thread.start()
    asked = rig.engine.received.get(timeout=20)
    rig.engine.send(answer)
    thread.join()
    return asked, responses[0]


def test_each_route_asks_the_engine_its_question_and_tells_its_answer(start_rig: StartRig) -> None:
    rig = start_rig()
    for route, (body, question, answer, status, told) in CASES.items():
        asked, response = called(rig, route, body, answer)
        assert (route, asked) == (route, question)
        assert (response.status_code, response.json()) == (status, told)


def test_what_the_engine_refuses_is_a_conflict_with_its_reason(start_rig: StartRig) -> None:
    rig = start_rig()
    for what, (body, answer) in REFUSALS.items():
        _, response = called(rig, f"POST /admin/{what}", body, answer)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (409, f"cannot_{what}")
        assert error["message"] == "no"


def test_a_frozen_engine_makes_a_route_give_up_in_time(start_rig: StartRig) -> None:
    rig = start_rig(health_timeout_s=0.2)
    response = rig.http.get("/admin/reload")
    assert response.status_code == 503
    assert "0.2 s" in response.json()["error"]["message"]
