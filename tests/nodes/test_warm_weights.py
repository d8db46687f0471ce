"""Each node keeps its own ranks' weights for those that come after them."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes.ray_nodes import RAY_ENV, START_S, Served, served, start_ray
from tests.nodes.rig import Machine, Network

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.model]

OPTIONS = ("--address=auto", "--groups=2", "--max-restarts=10")
NODE_END_S = 30.0


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Two machines with a CPU of one Ray each."""
    with Network(2) as network:
        start_ray(network.machines, num_cpus=1, env=RAY_ENV)
        yield network


def how_they_loaded(cluster: Served) -> list[str]:
    """`read` or `mapped`, of each rank that has loaded, in the order of the log."""
    return [
        word.partition("=")[2]
        for line in cluster.events("worker_loaded")
        for word in line.split()
        if word.startswith("weights=") and "it last wrote" not in line
    ]


def wait_for_loads(cluster: Served, count: int) -> list[str]:
    """Ray brings what actors write a while later."""
    deadline = time.monotonic() + 2 * START_S
    while len(found := how_they_loaded(cluster)) < count:
        assert time.monotonic() < deadline, Path(cluster.log).read_text(encoding="utf-8")
        time.sleep(0.2)
    return found


def keepers_on(machine: Machine) -> int:
    return sum("KeeperActor" in line for line in machine.commands())


def test_a_rank_that_was_killed_on_another_node_finds_its_weights_there_and_nothing_is_left(
    network: Network,
) -> None:
    head, worker = network.machines
    with served(head, *OPTIONS, env=RAY_ENV) as cluster:
        assert wait_for_loads(cluster, 2) == ["read", "read"]
        assert (keepers_on(head), keepers_on(worker)) == (0, 1)

        worker.run(["pkill", "-9", "-f", "ray::RankActor"])

        assert wait_for_loads(cluster, 3) == ["read", "read", "mapped"]
    deadline = time.monotonic() + NODE_END_S
    while keepers_on(worker):
        assert time.monotonic() < deadline, "what kept weights lives on"
        time.sleep(0.2)
