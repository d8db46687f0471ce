"""What happens to one node does not end the streams of it: they go on on the other node."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.nodes.ray_nodes import RAY_ENV, START_S, Served, served, start_ray
from tests.nodes.rig import HOME, Machine, Network

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.model]

OPTIONS = ("--address=auto", "--groups=2", "--max-restarts=10", "--peer-timeout-s=3")

STREAM = """
import json, sys
from stoker import Client, SamplingParams
address, key_file = sys.argv[1:]
prompts = ["Once upon a time", "def main():", "The capital of France", "1 2 3 4"]
asked = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 7, "logprobs": 1},
    {"temperature": 0.8, "seed": 8, "repetition_penalty": 1.2},
]
with Client(address, key_file=key_file) as client:
    handles = [
        client.submit(prompt, SamplingParams(max_tokens=64, ignore_eos=True, **fields))
        for prompt in prompts for fields in asked
    ]
    for handle in handles:
        next(iter(handle))
    print("streaming", flush=True)
    outputs = [handle.result(240.0).outputs[0] for handle in handles]
print(json.dumps([[out.finish_reason, out.token_ids] for out in outputs]))
"""
"""A client's program: many streams at once; it says when each has begun."""


@pytest.fixture
def network() -> Iterator[Network]:
    """Two machines with a CPU of one Ray each."""
    with Network(2) as network:
        start_ray(network.machines, num_cpus=1, env=RAY_ENV)
        yield network


def streams(head: Machine, cluster: Served, then: Callable[[], None]) -> object:
    """What the client's program gets, if `then` happens when all its streams have begun."""
    client = head.start([sys.executable, "-c", STREAM, cluster.front, f"{HOME}/key"])
    assert client.stdout is not None
    assert client.stdout.readline() == "streaming\n"
    then()
    printed, _ = client.communicate(timeout=300.0)
    assert client.returncode == 0
    return json.loads(printed.splitlines()[-1])


def wait_for(cluster: Served, event: str, count: int) -> None:
    """Wait until the log has so many of this event."""
    deadline = time.monotonic() + 2 * START_S
    while len(cluster.events(event)) < count:
        assert time.monotonic() < deadline, Path(cluster.log).read_text(encoding="utf-8")
        time.sleep(0.2)


def workers_on(machine: Machine) -> list[str]:
    return [line for line in machine.commands() if "RankActor" in line]


def test_streams_go_on_when_the_link_to_a_node_is_cut_and_the_node_comes_back_when_it_heals(
    network: Network,
) -> None:
    head, worker = network.machines
    with served(head, *OPTIONS, env=RAY_ENV) as cluster:
        expected = streams(head, cluster, lambda: None)

        def cut_and_heal() -> None:
            network.cut(worker)
            wait_for(cluster, "engine group_lost", 1)
            network.heal(worker)  # before Ray gives the node up, which it never takes back

        assert streams(head, cluster, cut_and_heal) == expected
        wait_for(cluster, "engine group_ready", 3)
        assert streams(head, cluster, lambda: None) == expected
        assert len(workers_on(worker)) <= 1, "the rank that was cut off lives on"


def test_streams_go_on_when_a_nodes_raylet_is_killed(network: Network) -> None:
    head, worker = network.machines
    with served(head, *OPTIONS, env=RAY_ENV) as cluster:
        expected = streams(head, cluster, lambda: None)

        def kill() -> None:
            worker.run(["pkill", "-9", "-x", "raylet"])

        assert streams(head, cluster, kill) == expected
        assert cluster.events("engine group_lost")
        assert streams(head, cluster, lambda: None) == expected


def test_streams_go_on_when_everything_on_a_node_is_killed(network: Network) -> None:
    head, worker = network.machines
    with served(head, *OPTIONS, env=RAY_ENV) as cluster:
        expected = streams(head, cluster, lambda: None)

        def kill() -> None:
            worker.run(["bash", "-c", "kill -9 -1"], check=False)

        assert streams(head, cluster, kill) == expected
        assert cluster.events("engine group_lost")
        assert workers_on(worker) == []
        assert streams(head, cluster, lambda: None) == expected
