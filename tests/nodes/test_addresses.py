"""Machines with several addresses: ranks and engine meet where Ray or the node itself says."""

import re

import pytest

from tests.nodes.ray_nodes import RAY_ENV, answers, served, start_ray
from tests.nodes.rig import SECOND_SUBNETS, Machine, Network

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.model]

LOADED = "engine worker_loaded"

SUMS_BYTES = 1 << 20
"""What the ranks' sums exceed by far, and everything else together does not reach."""


def second_addresses(machines: list[Machine], subnet: str) -> list[str]:
    return [f"{subnet}{number}" for number, _ in enumerate(machines, 1)]


def bytes_over(machine: Machine, interface: str) -> int:
    """Received there so far."""
    text = machine.run(["cat", "/proc/net/dev"]).stdout
    found = re.search(rf"{interface}: *(\d+)", text)
    assert found is not None, text
    return int(found[1])


@pytest.mark.parametrize("subnet", SECOND_SUBNETS, ids=["IPv4", "IPv6"])
def test_case_103_nodes_meet_where_ray_knows_them_not_where_the_default_route_leads(
    subnet: str,
) -> None:
    with Network(2) as network:
        network.connect_twice()
        for machine in network.machines:
            network.cut(machine)  # whoever takes the first interface waits in vain
        addresses = second_addresses(network.machines, subnet)
        start_ray(network.machines, num_cpus=1, env=RAY_ENV, addresses=addresses)
        head = network.machines[0]
        with served(head, "--address=auto", "--tensor-parallel-size=2", env=RAY_ENV) as cluster:
            found = answers(head, head, cluster, ["Once upon a time"])
            hosts = {line.partition(" host=")[2].split()[0] for line in cluster.events(LOADED)}

    assert found
    assert hosts == {machine.name for machine in network.machines}


@pytest.mark.parametrize("subnet", SECOND_SUBNETS, ids=["IPv4", "IPv6"])
def test_cases_103_and_107_each_node_is_reached_where_it_says_itself_whatever_the_first_one_sends(
    subnet: str,
) -> None:
    with Network(2) as network:
        network.connect_twice()
        head, worker = network.machines
        addresses = second_addresses(network.machines, subnet)
        own = [{"STOKER_NODE_ADDRESS": address} for address in addresses]
        start_ray(network.machines, num_cpus=1, env=RAY_ENV, own_env=own)
        options = ["--address=auto", "--tensor-parallel-size=2"]
        options += ["--worker-env=STOKER_NODE_ADDRESS"]
        with served(head, *options, env={**RAY_ENV, **own[0]}) as cluster:
            before = [bytes_over(worker, name) for name in ("eth0", "eth1")]
            assert answers(head, head, cluster, ["Once upon a time"] * 4)
            after = [bytes_over(worker, name) for name in ("eth0", "eth1")]

    first, second = (late - early for early, late in zip(before, after, strict=True))
    assert second > SUMS_BYTES > first
