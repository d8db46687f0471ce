"""`ray up` and `ray down` for real, with the file that we ship and addresses of our machines."""

import secrets
import time

import pytest

from tests.nodes.ray_nodes import answers, served
from tests.nodes.rig import BIN, HOME, ROOT, Machine, Network
from tests.nodes.ssh import start_sshd

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.model]

GONE_S = 100.0
"""Ray's agents outlive it for a minute on workers, which `ray down` does not look at."""

TOKEN_MODE = {"RAY_AUTH_MODE": "token"}  # the file's own; ~/.ray/auth_token is the secret


def ours(machine: Machine) -> list[str]:
    return [line for line in machine.commands() if "sshd" not in line]


def test_the_shipped_file_brings_two_machines_up_that_serve_and_go_down_again() -> None:
    with Network(3) as network:
        head, worker, laptop = network.machines
        start_sshd([head, worker], laptop)
        shipped = (ROOT / "deploy/ray-cluster.yaml").read_text(encoding="utf-8")
        for ours_, theirs in (
            (head.address, "10.0.0.1"),
            (worker.address, "10.0.0.2"),
            ("ssh_user: root", "ssh_user: ubuntu"),
        ):
            assert shipped.count(theirs) == 1
            shipped = shipped.replace(theirs, ours_)
        (laptop.home / "ray.yaml").write_text(shipped)
        (laptop.home / ".ray").mkdir()
        (laptop.home / ".ray/auth_token").write_text(secrets.token_hex(32))
        (laptop.home / ".ray/auth_token").chmod(0o600)

        up = f"cd {ROOT} && exec {BIN}/ray up -y --no-config-cache {HOME}/ray.yaml"
        laptop.run(["bash", "-c", up], timeout_s=300)
        nodes = [f"{BIN}/python", "-m", "cluster.ray_nodes_main", "240"]
        head.run([*nodes, head.address, worker.address], env=TOKEN_MODE, timeout_s=300)
        options = ["--address=auto", "--tensor-parallel-size=2", "--groups=2"]
        with served(head, *options, env=TOKEN_MODE) as cluster:
            found = answers(laptop, head, cluster, ["The capital of France is"])
            loaded = cluster.events("engine worker_loaded")
        laptop.run([f"{BIN}/ray", "down", "-y", f"{HOME}/ray.yaml"], timeout_s=120)

        assert found
        assert {name for name in ("n1", "n2") if any(f" host={name} " in e for e in loaded)} == {
            head.name,
            worker.name,
        }
        deadline = time.monotonic() + GONE_S
        while left := [*ours(head), *ours(worker)]:
            assert time.monotonic() < deadline, left
            time.sleep(1.0)
