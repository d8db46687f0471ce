"""One model over two nodes: the answers are those of one node, to the bit, and reach a third."""

import functools
from collections.abc import Iterator

import pytest

from tests.nodes.ray_nodes import RAY_ENV, Served, answers, served, start_ray
from tests.nodes.rig import Machine, Network

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.model]

PROMPTS = ("The capital of France is", "Once upon a time", "2 + 2 =", "def main():")


@pytest.fixture(scope="module", params=[1, 2], ids="{}_cpus".format)
def machines(request: pytest.FixtureRequest) -> Iterator[list[Machine]]:
    """Two with so many CPUs of one Ray each, and one that is only a client."""
    with Network(3) as network:
        start_ray(network.machines[:2], num_cpus=request.param, env=RAY_ENV)
        yield network.machines


@functools.cache
def alone(tensor_parallel_size: int) -> object:
    """What one machine answers that has all ranks."""
    size = f"--tensor-parallel-size={tensor_parallel_size}"
    with (
        Network(1) as network,
        served(network.machines[0], "--backend=local", size, env={}) as cluster,
    ):
        return answers(network.machines[0], network.machines[0], cluster, PROMPTS)


def hosts_of_ranks(cluster: Served) -> list[str]:
    """By rank, the host that it said to be on."""
    lines = cluster.events("engine worker_loaded")
    return [line.partition(" host=")[2].split()[0] for line in sorted(lines, key=rank_in)]


def rank_in(line: str) -> tuple[int, int]:
    fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
    return int(fields["group"]), int(fields["rank"])


@pytest.mark.parametrize(
    ("machines", "sizes"),
    [
        (1, {"tensor-parallel-size": 2}),
        (1, {"groups": 2}),
        (1, {"pipeline-parallel-size": 2}),
        (2, {"tensor-parallel-size": 2, "pipeline-parallel-size": 2}),
    ],
    indirect=["machines"],
    ids=lambda value: "-".join(f"{k}-{v}" for k, v in value.items()) if type(value) is dict else "",
)
def test_ranks_on_two_nodes_answer_a_client_on_a_third_as_one_node_does(
    machines: list[Machine], sizes: dict[str, int]
) -> None:
    head, worker, client = machines
    options = [f"--{name}={value}" for name, value in sizes.items()]

    with served(head, "--address=auto", *options, env=RAY_ENV) as cluster:
        found = answers(client, head, cluster, PROMPTS)
        where = hosts_of_ranks(cluster)

    assert set(where) == {head.name, worker.name}
    size = sizes.get("tensor-parallel-size", 1)
    stages = [where[first : first + size] for first in range(0, len(where), size)]
    if sizes.get("pipeline-parallel-size", 1) > 1 or "groups" in sizes:
        assert all(len(set(stage)) == 1 for stage in stages), "a stage is on one node"
    assert found == alone(size)
