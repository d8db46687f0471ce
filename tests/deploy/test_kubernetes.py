"""The manifests for Kubernetes: by its own schemas, by Helm, and by what a server needs of them.

KubeRay's own fields are checked against the names that its API has.
"""

import copy
import re
from typing import cast

import helm_python
import kubernetes_validate
import pytest

from tests.deploy.files import (
    CHART,
    DEPLOY,
    ROOT,
    VARIANTS,
    Tree,
    containers,
    every_command,
    manifests,
    pods,
    read,
    rendered,
    settings_of,
    words_of,
)

KUBERNETES = "1.37"
"""Whose schemas are asked."""


def test_every_manifest_fits_the_schemas_of_kubernetes() -> None:
    for where, trees in manifests().items():
        for document in trees:
            if str(document["apiVersion"]).startswith("ray.io/"):
                for pod in pods(document):
                    named = {"metadata": {"name": "of-ray"}, "template": pod}
                    check(where, {"apiVersion": "v1", "kind": "PodTemplate", **named})
            else:
                check(where, document)


def check(where: str, document: Tree) -> None:
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        pytest.fail(f"{where}: {document['kind']}: {error.path} {error.message}")


def test_the_schemas_refuse_what_kubernetes_would() -> None:
    (service,) = (one for one in read("kubernetes/stoker.yaml") if one["kind"] == "Service")
    broken = copy.deepcopy(service)
    cast("Tree", broken["spec"])["port"] = 80
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES, strict=True)


def test_helm_has_nothing_to_say_against_the_chart() -> None:
    for values in VARIANTS.values():
        report = helm_python.lint(str(CHART), values, strict=True)
        assert report["errors"] == []
        worst = max((message["severity"] for message in report["messages"]), default=0)
        assert worst <= 1, report


def test_the_manifest_without_helm_is_what_the_chart_makes_with_nothing_set() -> None:
    text = (DEPLOY / "kubernetes" / "stoker.yaml").read_text(encoding="utf-8")
    head, separator, rest = text.partition("---\n")
    assert all(line.startswith("#") for line in head.splitlines())
    assert separator + rest == rendered("as it is")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"gpus": 3, "tensorParallelSize": 2}, "gpus is 3, but .* is 2: each rank takes one GPU"),
        ({"cpus": 2, "numGroups": 3}, "cpus is 2, but .* is 3: each rank wants a CPU"),
        ({"replicas": "many"}, "replicas"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"drain": {"ending": 1}}, "ending"),
    ],
)
def test_the_chart_refuses_values_that_cannot_work(values: Tree, reason: str) -> None:
    with (
        helm_python.Chart.load(str(CHART)) as chart,
        pytest.raises(helm_python.HelmError, match=reason),
    ):
        chart.render(values, name="stoker", namespace="default")


def test_cpus_of_a_pod_are_dealt_to_its_ranks_as_threads() -> None:
    for variant, threads in (("as it is", 4), ("all that can be said", 2), ("gpus", None)):
        (pod,) = pods_of(f"chart, {variant}")
        config, _ = settings_of(words_of(containers(pod)["stoker"]))
        assert config.num_threads == threads
        assert config.pin_cores is (threads is None), "two Pods of a node would take the same cores"
        gpus = cast("Tree", cast("Tree", containers(pod)["stoker"]["resources"])["limits"]).get(
            "nvidia.com/gpu"
        )
        assert gpus == (None if threads else config.num_ranks)


def pods_of(where: str) -> list[Tree]:
    return [pod for document in manifests()[where] for pod in pods(document)]


def servers() -> list[tuple[str, Tree, Tree]]:
    """Each container that serves, with its Pod and where it stands."""
    return [
        (where, pod, containers(pod)["stoker"])
        for where in manifests()
        for pod in pods_of(where)
        if "stoker" in containers(pod)
    ]


def test_case_111_no_probe_ends_a_server_that_fetches_or_loads_its_model() -> None:
    """The port opens when the model is fetched; from then on /health is 200, and /ready is 503
    until it is loaded (tests/cluster/api/test_serving.py)."""
    assert len(servers()) == 5
    for where, _, server in servers():
        config, http = settings_of(words_of(server))
        startup, liveness, readiness = (
            cast("Tree", server[f"{kind}Probe"]) for kind in ("startup", "liveness", "readiness")
        )
        for probe, path in ((startup, "/health"), (liveness, "/health"), (readiness, "/ready")):
            assert cast("Tree", probe["httpGet"])["path"] == path, where
            assert cast("int", probe["timeoutSeconds"]) > http.health_timeout_s, (
                "an engine that does not answer is told by 503, in health_timeout_s"
            )
        patience_s = cast("int", startup["periodSeconds"]) * cast(
            "int", startup["failureThreshold"]
        )
        assert patience_s >= 600, f"{where}: too little for a large model to be fetched"
        assert config.start_timeout_s >= 600, f"{where}: too little for a large model to be loaded"
        assert {"/ready", "/metrics"} <= set(http.open_paths), "probes and scrapers have no key"
        assert http.host == "0.0.0.0"


def test_case_112_a_pod_is_given_the_time_that_its_drain_takes() -> None:
    for where, pod, server in servers():
        config, _ = settings_of(words_of(server))
        granted_s = cast("int", cast("Tree", pod["spec"])["terminationGracePeriodSeconds"])
        routing_s = pre_stop_s(server)
        assert routing_s >= 1, f"{where}: routers send calls until they know"
        # The engine, the front ends, the workers and Ray, one after the other.
        assert granted_s >= routing_s + config.drain_s + 4 * config.stop_timeout_s, where


def pre_stop_s(container: Tree) -> int:
    hook = cast("Tree", cast("Tree", container["lifecycle"])["preStop"])
    program, seconds = cast("list[str]", cast("Tree", hook["exec"])["command"])
    assert program == "sleep"
    return int(seconds)


def test_case_112_ray_outlives_the_drain_of_the_engine_on_it() -> None:
    head, workers = pods_of("kuberay/raycluster.yaml")
    config, _ = settings_of(words_of(containers(head)["stoker"]))
    drained_s = pre_stop_s(containers(head)["stoker"]) + config.drain_s
    for pod, name in ((head, "ray-head"), (workers, "ray-worker")):
        assert pre_stop_s(containers(pod)[name]) > drained_s
        spec = cast("Tree", pod["spec"])
        assert cast("int", spec["terminationGracePeriodSeconds"]) > drained_s


def test_the_engine_shares_with_the_ray_beside_it_what_a_driver_needs() -> None:
    """Its files, its shared memory and its processes: by trial, a driver in a PID namespace of its
    own is kept waiting for a minute and then refused."""
    head, _ = pods_of("kuberay/raycluster.yaml")
    assert cast("Tree", head["spec"])["shareProcessNamespace"] is True
    mounts = [cast("list[Tree]", one["volumeMounts"]) for one in containers(head).values()]
    assert mounts[0] == mounts[1]
    assert {"/tmp/ray", "/dev/shm"} <= {str(mount["mountPath"]) for mount in mounts[0]}


def test_every_pod_that_serves_may_be_evicted_only_as_its_budget_allows() -> None:
    for where, trees in manifests().items():
        if where == "kuberay/rayjob.yaml":
            continue
        (budget,) = (one for one in trees if one["kind"] == "PodDisruptionBudget")
        wanted = labels_of(cast("Tree", budget["spec"])["selector"])
        (server,) = (pod for pod in pods_of(where) if "stoker" in containers(pod))
        have = cast("Tree", cast("Tree", server["metadata"])["labels"])
        assert wanted.items() <= have.items(), where
        (service,) = (one for one in trees if one["kind"] == "Service")
        chosen = cast("Tree", cast("Tree", service["spec"])["selector"])
        assert chosen.items() <= have.items(), where


def labels_of(selector: object) -> Tree:
    return cast("Tree", cast("Tree", selector)["matchLabels"])


KUBERAY = {
    "RayCluster": {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"},
    "RayJob": {
        "submissionMode",
        "entrypoint",
        "backoffLimit",
        "shutdownAfterJobFinishes",
        "ttlSecondsAfterFinished",
        "rayClusterSpec",
    },
    "head": {"serviceType", "rayStartParams", "template"},
    "workers": {
        "groupName",
        "replicas",
        "minReplicas",
        "maxReplicas",
        "rayStartParams",
        "template",
    },
}
"""Names of fields in KubeRay's API (ray.io/v1). No package carries its schemas; these files were
held against those of KubeRay 1.7 by hand."""


def test_kuberay_files_use_names_that_its_api_has_and_the_version_of_ray_that_is_locked() -> None:
    (locked,) = re.findall(r"(?m)^ray==(.+)$", (ROOT / "requirements.lock").read_text())
    for name in ("kuberay/raycluster.yaml", "kuberay/rayjob.yaml"):
        ray = read(name)[0]
        spec = cast("Tree", ray["spec"])
        assert set(spec) <= KUBERAY[str(ray["kind"])]
        cluster = cast("Tree", spec.get("rayClusterSpec", spec))
        assert set(cluster) <= KUBERAY["RayCluster"]
        assert cluster["rayVersion"] == locked
        assert cluster["authOptions"] == {"mode": "token"}
        head = cast("Tree", cluster["headGroupSpec"])
        assert set(head) <= KUBERAY["head"]
        for group in cast("list[Tree]", cluster["workerGroupSpecs"]):
            assert set(group) <= KUBERAY["workers"]
            params = {
                **cast("Tree", head["rayStartParams"]),
                **cast("Tree", group["rayStartParams"]),
            }
            assert all(isinstance(value, str) for value in params.values()), "KubeRay wants texts"


def test_the_nodes_of_the_ray_cluster_hold_the_ranks_that_the_engine_asks_for() -> None:
    for name, key in (("kuberay/raycluster.yaml", None), ("kuberay/rayjob.yaml", "rayClusterSpec")):
        (words,) = (words for where, words in every_command().items() if where.startswith(name))
        config, _ = settings_of(words)
        spec = cast("Tree", read(name)[0]["spec"])
        cluster = cast("Tree", spec[key]) if key else spec
        groups = cast("list[Tree]", cluster["workerGroupSpecs"])
        cpus = [
            int(str(cast("Tree", group["rayStartParams"])["num-cpus"]))
            for group in groups
            for _ in range(cast("int", group["replicas"]))
        ]
        assert sum(cpus) == config.num_ranks
        assert max(cpus) >= config.tensor_parallel_size, "a stage fits on a node"
