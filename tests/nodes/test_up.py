"""`stoker up` and `stoker down` over secure shells: two machines serve, a third asks."""

import json
import sys
from collections.abc import Iterator

import pytest

from tests.nodes.ray_nodes import ASK, MODELS
from tests.nodes.rig import BIN, HOME, Machine, Network
from tests.nodes.ssh import start_sshd

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.model]

UP_S = 400.0

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
start_timeout_s = {start_timeout_s}
[serve]
model = "smollm2"
models_dir = "{models}"
tensor_parallel_size = 2
max_model_len = 512
num_kv_blocks = 256
"""


@pytest.fixture
def network() -> Iterator[Network]:
    """A head and a worker, and a laptop whose key opens both."""
    with Network(3) as network:
        head, worker, laptop = network.machines
        start_sshd([head, worker], laptop)
        yield network


def write_file(network: Network, *, start_timeout_s: float) -> None:
    head, worker, laptop = network.machines
    text = FILE.format(
        head=head.address,
        worker=worker.address,
        bin=BIN,
        models=MODELS,
        start_timeout_s=start_timeout_s,
    )
    (laptop.home / "cluster.toml").write_text(text)


def ours(machine: Machine) -> list[str]:
    """What runs on a machine besides its secure shell."""
    return [line for line in machine.commands() if "sshd" not in line]


def check_nothing_is_left(network: Network) -> None:
    head, worker, laptop = network.machines
    for machine in (head, worker):
        assert not ours(machine)
        for pattern in ("home/.stoker/*", "home/ray_bootstrap*", "ray*", "stoker*"):
            assert not list((machine.files / "tmp").glob(pattern)), pattern
        assert not list((machine.files / "dev/shm").iterdir())
    assert not list(laptop.home.glob(".stoker/*"))
    assert not list((laptop.files / "tmp/ray").glob("cluster-*"))


def test_one_command_serves_from_two_machines_and_one_ends_it_without_a_trace(
    network: Network,
) -> None:
    head, worker, laptop = network.machines
    write_file(network, start_timeout_s=300.0)

    up = laptop.run(["stoker", "up", "cluster.toml"], timeout_s=UP_S).stdout

    front = next(line for line in up.splitlines() if line.startswith("tcp://"))
    http = next(line for line in up.splitlines() if line.startswith("http://"))
    key = (laptop.home / ".stoker/trial/api_key").read_text().strip()
    models = laptop.run(["curl", "-s", "-H", f"Authorization: Bearer {key}", f"{http}/v1/models"])
    assert "smollm2" in models.stdout
    asked = json.dumps([front, f"{HOME}/.stoker/trial/key", ["The capital of France is"]])
    assert laptop.run([sys.executable, "-c", ASK, asked]).returncode == 0
    for machine in (head, worker):
        assert any("RankActor" in line for line in ours(machine)), machine.name

    down = laptop.run(["stoker", "down", "cluster.toml"], timeout_s=UP_S).stdout

    assert "nothing is left on any node" in down
    check_nothing_is_left(network)


def test_case_114_a_worker_whose_ray_does_not_start_is_named_with_its_own_words(
    network: Network,
) -> None:
    head, worker, laptop = network.machines
    write_file(network, start_timeout_s=60.0)
    (worker.home / "ray").write_text(
        "#!/bin/sh\n"
        "case $1 in start) echo this one has no fire >&2; exit 1;; esac\n"
        f'exec {BIN}/python -m ray.scripts.scripts "$@"\n'
    )
    (worker.home / "ray").chmod(0o755)
    worker.run(["mount", "--bind", f"{HOME}/ray", f"{BIN}/ray"])

    up = laptop.run(["stoker", "up", "cluster.toml"], timeout_s=UP_S, check=False)

    assert up.returncode == 1
    assert f"{worker.address} did not join Ray within" in up.stdout
    assert f"  {worker.address:<16} missing" in up.stdout
    assert "this one has no fire" in up.stdout
    assert "`stoker down cluster.toml` ends what runs of it already" in up.stdout
    assert ours(head)

    network.cut(head)
    down = laptop.run(["stoker", "down", "cluster.toml"], timeout_s=UP_S, check=False)
    assert down.returncode == 1
    assert f"{head.address} cannot be reached" in down.stdout
    network.heal(head)

    for _ in range(2):  # the second finds nothing, and says so
        down = laptop.run(["stoker", "down", "cluster.toml"], timeout_s=UP_S)
        assert "nothing is left on any node" in down.stdout
    check_nothing_is_left(network)
