"""`stoker up` and `stoker down` over secure shells: two machines serve, a third asks."""

import json
import sys

import pytest

from tests.nodes.ray_nodes import ASK, MODELS
from tests.nodes.rig import BIN, HOME, Machine, Network
from tests.nodes.ssh import start_sshd

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.model]

FILE = """
name = "trial"
[nodes]
head = "{head}"
workers = ["{worker}"]
ssh_user = "root"
ssh_key = "~/.ssh/id_ed25519"
bin = "{bin}"
num_cpus = 1
ray_options = ["--object-store-memory=83886080"]
[serve]
model = "smollm2"
models_dir = "{models}"
tensor_parallel_size = 2
max_model_len = 512
num_kv_blocks = 256
"""


def ours(machine: Machine) -> list[str]:
    """What runs on a machine besides its secure shell."""
    return [line for line in machine.commands() if "sshd" not in line]


def test_one_command_serves_from_two_machines_and_one_ends_it_without_a_trace() -> None:
    with Network(3) as network:
        head, worker, laptop = network.machines
        start_sshd([head, worker], laptop)
        text = FILE.format(head=head.address, worker=worker.address, bin=BIN, models=MODELS)
        (laptop.home / "cluster.toml").write_text(text)

        up = laptop.run(["stoker", "up", "cluster.toml"], timeout_s=400).stdout

        front = next(line for line in up.splitlines() if line.startswith("tcp://"))
        http = next(line for line in up.splitlines() if line.startswith("http://"))
        key = (laptop.home / ".stoker/trial/api_key").read_text().strip()
        models = laptop.run(
            ["curl", "-s", "-H", f"Authorization: Bearer {key}", f"{http}/v1/models"]
        )
        assert "smollm2" in models.stdout
        asked = json.dumps([front, f"{HOME}/.stoker/trial/key", ["The capital of France is"]])
        assert laptop.run([sys.executable, "-c", ASK, asked]).returncode == 0
        for machine in (head, worker):
            assert any("RankActor" in line for line in ours(machine)), machine.name

        down = laptop.run(["stoker", "down", "cluster.toml"], timeout_s=400).stdout

        assert "nothing is left on any node" in down
        for machine in (head, worker):
            assert not ours(machine)
            assert not list(machine.home.glob(".stoker/*"))
            assert not list(machine.home.glob("ray_bootstrap*"))
