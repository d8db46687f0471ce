"""Whole clusters of processes that are upgraded under load, with scripted workers."""

import signal
from collections.abc import Iterator

import psutil
import pytest

from cluster.frontend.draft import RequestOptions
from cluster.frontend.engine_client import ClientConfig, EngineClient
from cluster.messages.changes import ClusterUpgraded
from cluster.messages.reports import Status
from scheduler.sampling import SamplingParams
from tests.cluster.scripted import tokens_after
from tests.cluster.test_supervisor import ClusterProcess, Clusters

NUM_TOKENS = 200


@pytest.fixture
def clusters() -> Iterator[Clusters]:
    clusters = Clusters()
    yield clusters
    clusters.clear()


def start_busy_cluster(clusters: Clusters, **settings: object) -> tuple[ClusterProcess, str]:
    cluster = clusters.start({"0": {"step_s": 0.01}}, num_groups=2, max_num_seqs=4, **settings)
    client = cluster.up()
    return cluster, client.link.address


def pids_of(status: Status) -> set[int]:
    return {rank.pid for group in status.groups for rank in group.ranks}


@pytest.mark.parametrize("way", ["asked", "SIGUSR2"])
def test_core_and_groups_are_new_and_every_stream_is_whole(clusters: Clusters, way: str) -> None:
    cluster, address = start_busy_cluster(clusters)
    core = cluster.engine()
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    options = RequestOptions()
    client = EngineClient(ClientConfig(address=address))
    before = pids_of(client.status())
    live = [client.submit(client.draft([1, 2, 3, 4], sampling, options)) for _ in range(6)]
    client.wait_for(live[0], lambda: len(live[0].outputs[0].token_ids) > 5, 20.0)
    if way == "asked":
        assert client.upgrade().refusal == ""
    else:
        cluster.process.send_signal(signal.SIGUSR2)
    cluster.wait_for("upgrade_ended")
    for each in live:
        client.wait_done(each, 60.0)
    after = client.status()
    done = client.upgrade(only_asks=True)
    client.close()

    assert [each.failure for each in live] == [None] * len(live)
    expected = tokens_after(4, NUM_TOKENS)
    assert all(each.outputs[0].token_ids == expected for each in live)
    assert done == ClusterUpgraded(phase="idle", num_done=1)
    assert not core.is_running()
    assert not pids_of(after) & before
    assert len(pids_of(after)) == len(before)
    assert cluster.end() == 0
    cluster.check_nothing_is_left()


def test_a_new_core_that_does_not_come_up_leaves_the_cluster_as_it_is(
    clusters: Clusters,
) -> None:
    cluster, address = start_busy_cluster(clusters)
    core = cluster.engine()
    client = EngineClient(ClientConfig(address=address))
    client.upgrade()
    standby = wait_for_standby(cluster, core)
    standby.kill()
    cluster.wait_for("upgrade_ended")
    done = client.upgrade(only_asks=True)
    client.close()

    assert "ended at once: killed by signal 9" in done.failure
    assert core.is_running()
    assert cluster.end() == 0
    cluster.check_nothing_is_left()


def wait_for_standby(cluster: ClusterProcess, core: psutil.Process) -> psutil.Process:
    cluster.wait_for("upgrade_step step=prepare")
    children = psutil.Process(cluster.process.pid).children(recursive=True)
    return next(
        child
        for child in children
        if child.pid != core.pid and "--standby" in " ".join(child.cmdline())
    )
