"""The doctor on two real nodes: well, it says nothing; spoilt in one place, it names that place."""

import json
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.nodes.ray_nodes import MODELS, RAY_ENV, start_ray
from tests.nodes.rig import HOME, Machine, Network

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.model]

MODEL = MODELS / "smollm2-135m-instruct"
LIMIT_S = 60.0
"""The doctor itself takes at most 15 s; this machine may be busy."""

Alarm = tuple[str, str]


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Two machines with a CPU of one Ray each, whose names resolve as they should."""
    with Network(2) as network:
        for machine in network.machines:
            name_it(machine, machine.address)
        start_ray(network.machines, num_cpus=1, env=RAY_ENV)
        yield network


def name_it(machine: Machine, address: str) -> None:
    hosts = f"127.0.0.1 localhost\n{address} {machine.name}\n"
    (machine.files / "etc/hosts").write_text(hosts)


def examine(machine: Machine, *options: str, **env: str) -> list[dict[str, str]]:
    """What the doctor finds amiss from this machine."""
    command = ["stoker", "doctor", str(MODEL), "--json", "--address=10.77.0.1:6379", *options]
    command += [f"--models-dir={HOME}"]
    done = machine.run(command, env={**RAY_ENV, **env}, timeout_s=LIMIT_S, check=False)
    said = next(line for line in done.stdout.splitlines() if line.startswith("["))
    findings = [{"subject": "", "fix": "", **finding} for finding in json.loads(said)]
    assert done.returncode == (1 if any(f["level"] == "fail" for f in findings) else 0)
    return [finding for finding in findings if finding["level"] != "ok"]


def culprits(found: list[dict[str, str]]) -> set[Alarm]:
    return {(finding["check"], finding["subject"]) for finding in found}


@contextmanager
def bound(machine: Machine, source: str, target: str) -> Iterator[None]:
    """Another file or folder in the place of one, on this machine alone."""
    machine.run(["mount", "--bind", source, target])
    try:
        yield
    finally:
        machine.run(["umount", target])


def in_network(machine: Machine, *command: str) -> None:
    subprocess.run(["nsenter", f"--target={machine.pid}", "--net", *command], check=True)


def raylet_of(machine: Machine) -> psutil.Process:
    first = psutil.Process(machine.pid)
    return next(p for p in first.children(recursive=True) if p.name() == "raylet")


def test_two_healthy_nodes_raise_no_alarm_from_either(network: Network) -> None:
    for machine in network.machines:
        assert examine(machine, "--tensor-parallel-size=2") == []


def test_a_host_name_that_resolves_to_loopback_is_named(network: Network) -> None:
    _, worker = network.machines
    name_it(worker, "127.0.1.1")
    try:
        found = examine(network.machines[0])
    finally:
        name_it(worker, worker.address)

    assert culprits(found) == {("host names", f"node {worker.address}, interface lo")}
    assert "127.0.1.1" in found[0]["seen"]


def test_more_ranks_than_cpus_are_named_with_asked_free_and_each_node(network: Network) -> None:
    found = examine(network.machines[0], "--tensor-parallel-size=3")

    assert culprits(found) == {("placement", "placement")}
    assert "asked for 3 CPUs" in found[0]["seen"]
    assert "10.77.0.1 1 of 1, 10.77.0.2 1 of 1" in found[0]["seen"]


def test_a_slow_link_is_named_with_its_figure(network: Network) -> None:
    _, worker = network.machines
    shape = "tc qdisc add dev eth0 root tbf rate 8mbit burst 32kbit latency 400ms"
    in_network(worker, *shape.split())
    try:
        found = examine(network.machines[0])
    finally:
        in_network(worker, "tc", "qdisc", "del", "dev", "eth0", "root")

    assert culprits(found) == {("speed", "nodes 10.77.0.1 and 10.77.0.2")}
    assert "MB/s" in found[0]["seen"]


def test_a_stopped_raylet_is_named(network: Network) -> None:
    _, worker = network.machines
    raylet = raylet_of(worker)
    raylet.send_signal(signal.SIGSTOP)
    try:
        found = examine(network.machines[0])
    finally:
        raylet.send_signal(signal.SIGCONT)

    assert culprits(found) == {("nodes", f"node {worker.address}")}


def test_a_wrong_token_is_named(network: Network) -> None:
    head, _ = network.machines
    (head.home / "other_token").write_text(secrets.token_hex(32))

    found = examine(head, RAY_AUTH_TOKEN_PATH=f"{HOME}/other_token")

    assert culprits(found) == {("ray", "Ray")}
    assert "token" in found[0]["seen"]
    assert "RAY_AUTH_TOKEN_PATH" in found[0]["fix"]


def test_an_address_without_ray_is_named(network: Network) -> None:
    found = examine(network.machines[0], "--address=10.77.0.1:6380")

    assert culprits(found) == {("ray", "Ray")}
    assert "nobody answers at 10.77.0.1:6380" in found[0]["seen"]


def test_another_model_on_one_node_is_named_with_both_digests(network: Network) -> None:
    head, worker = network.machines
    config = json.loads((MODEL / "config.json").read_text())
    (worker.home / "config.json").write_text(json.dumps({**config, "rope_theta": 1.0}))
    with bound(worker, f"{HOME}/config.json", str(MODEL / "config.json")):
        found = examine(head)

    assert culprits(found) == {("model", f"node {worker.address}")}
    assert "holds another model: digest" in found[0]["seen"]


def test_a_truncated_shard_on_one_node_is_named_with_the_file(network: Network) -> None:
    head, worker = network.machines
    shard = MODEL / "model.safetensors"
    with shard.open("rb") as whole, (worker.home / "cut").open("wb") as cut:
        shutil.copyfileobj(whole, cut, 1 << 20)
        cut.truncate(1 << 20)
    with bound(worker, f"{HOME}/cut", str(shard)):
        found = examine(head)
    (worker.home / "cut").unlink()

    assert culprits(found) == {("model", f"node {worker.address}")}
    assert str(shard) in found[0]["seen"]


def test_a_full_disk_and_a_small_shm_on_one_node_are_named(network: Network) -> None:
    head, worker = network.machines
    for folder, spare in (("tmp", 50 << 20), ("dev/shm", 20 << 20)):
        used = shutil.disk_usage(worker.files / folder).used
        worker.run(["mount", "-o", f"remount,size={used + spare}", f"/{folder}"])
    try:
        found = examine(head)
    finally:
        for folder in ("/tmp", "/dev/shm"):
            worker.run(["mount", "-o", "remount,size=2g", folder])

    assert culprits(found) == {
        ("disk", f"node {worker.address}"),
        ("shared memory", f"node {worker.address}"),
    }


def test_a_link_that_is_cut_is_named_by_its_node(network: Network) -> None:
    head, worker = network.machines
    network.cut(worker)
    try:
        found = examine(head)
    finally:
        network.heal(worker)

    assert culprits(found) == {("nodes", f"node {worker.address}")}
