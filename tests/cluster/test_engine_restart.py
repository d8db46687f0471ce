"""Whole clusters of processes whose engine dies or hangs: the workers stay, and serve the next."""

import os
import re
import signal
from collections.abc import Iterator

import pytest

from cluster.keys import read_key_file
from cluster.messages.reports import Status
from tests.cluster.cluster_rig import TestClient, wait_for_status
from tests.cluster.scripted import tokens_after
from tests.cluster.test_supervisor import ClusterProcess, Clusters


@pytest.fixture
def clusters() -> Iterator[Clusters]:
    clusters = Clusters()
    yield clusters
    clusters.clear()


def serves(status: Status) -> bool:
    return all(group.state == "ready" for group in status.groups)


def dial_again(cluster: ClusterProcess) -> TestClient:
    """A client of the engine that came after the last one."""
    assert cluster.client is not None
    address = cluster.client.link.address
    cluster.client.close()
    cluster.client = TestClient(address)
    cluster.client.hello()
    return cluster.client


def read_first_token(client: TestClient, handle: int) -> None:
    client.read_until(lambda: handle in client.tokens)


def kill_engine(cluster: ClusterProcess, number: int) -> None:
    cluster.engine().kill()
    cluster.wait_for(f"restarts={number} paused_s=")


def test_workers_outlive_an_engine_that_is_killed_twice_and_load_nothing_again(
    clusters: Clusters,
) -> None:
    cluster = clusters.start({"0": {"step_s": 0.01}}, num_groups=2, tensor_parallel_size=2)
    client = cluster.up()
    workers = cluster.pids(client.status())
    for number in (1, 2):
        handle = client.submit(max_tokens=200)
        read_first_token(client, handle)
        kill_engine(cluster, number)
        client = dial_again(cluster)
        status = wait_for_status(client, serves)
        client.finish(handle := client.submit(num_prompt=4, max_tokens=5))

        assert client.tokens[handle] == tokens_after(4, 5)
        assert cluster.pids(status) == workers
        assert [group.epoch for group in status.groups] == [1, 1]
        assert status.num_engine_restarts == number
    assert len(re.findall("loading$", cluster.text, re.MULTILINE)) == len(workers)
    assert cluster.end() == 0
    cluster.check_nothing_is_left()


@pytest.mark.slow
def test_an_engine_that_hangs_is_killed_and_its_workers_are_taken_over(clusters: Clusters) -> None:
    cluster = clusters.start(engine_hang_s=1.0, tensor_parallel_size=2)
    client = cluster.up()
    workers = cluster.pids(client.status())
    cluster.engine().suspend()
    line = cluster.wait_for("engine_recovered")
    client = dial_again(cluster)
    client.finish(handle := client.submit(num_prompt=4, max_tokens=5))

    assert "its loop was silent for engine_hang_s=1 (killed by signal 9)" in line
    assert client.tokens[handle] == tokens_after(4, 5)
    assert cluster.pids(client.status()) == workers
    assert cluster.end() == 0
    cluster.check_nothing_is_left()


@pytest.mark.slow
def test_over_tcp_the_next_engine_listens_at_the_same_ports_with_the_same_keys(
    clusters: Clusters,
) -> None:
    tcp = {"front_address": "tcp://127.0.0.1:0", "back_address": "tcp://127.0.0.1:0"}
    cluster = clusters.start(**tcp)
    client = cluster.up()
    address = client.link.address
    kill_engine(cluster, 1)
    assert cluster.key_file is not None
    client.close()
    client = cluster.client = TestClient(address, read_key_file(cluster.key_file))
    client.hello()
    client.finish(handle := client.submit(num_prompt=4, max_tokens=5))
    assert client.tokens[handle] == tokens_after(4, 5)
    assert cluster.end() == 0
    cluster.check_nothing_is_left()


@pytest.mark.slow
def test_an_engine_that_dies_again_and_again_ends_the_cluster_with_the_reason(
    clusters: Clusters,
) -> None:
    cluster = clusters.start(max_engine_restarts=2)
    cluster.up()
    kill_engine(cluster, 1)
    kill_engine(cluster, 2)
    cluster.engine().kill()

    assert cluster.wait() == 1
    assert "the engine process ended: killed by signal 9; max_engine_restarts=2" in cluster.text
    cluster.check_nothing_is_left()


@pytest.mark.slow
def test_a_rank_that_dies_with_the_engine_costs_its_own_group_a_restart_alone(
    clusters: Clusters,
) -> None:
    cluster = clusters.start(num_groups=2, max_restarts=1)
    client = cluster.up()
    first, second = cluster.pids(client.status())
    cluster.engine().suspend()  # so that it does not see the other's end
    os.kill(first, signal.SIGKILL)
    cluster.wait_for("rank_exited group=0")
    kill_engine(cluster, 1)
    client = dial_again(cluster)
    status = wait_for_status(client, serves)

    assert [group.epoch for group in status.groups] == [2, 1]
    assert cluster.pids(status)[1] == second
    assert cluster.end() == 0
    cluster.check_nothing_is_left()


@pytest.mark.slow
def test_a_group_that_is_starting_when_the_engine_dies_goes_on_with_its_start(
    clusters: Clusters,
) -> None:
    cluster = clusters.start(num_groups=2, max_restarts=1, tensor_parallel_size=2)
    client = cluster.up()
    os.kill(cluster.pids(client.status())[3], signal.SIGKILL)
    cluster.wait_for("[worker 1.2.0] loading")
    kill_engine(cluster, 1)
    client = dial_again(cluster)
    status = wait_for_status(client, serves)

    assert [group.epoch for group in status.groups] == [1, 2]
    assert cluster.text.count("[worker 1.2.0] loading") == 1
    assert cluster.end() == 0
    cluster.check_nothing_is_left()
