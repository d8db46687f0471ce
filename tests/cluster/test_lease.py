"""A rank that hears nothing, since it is stuck, ends when its engine has given it up."""

import queue
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from cluster.backend import WorkerLaunch
from cluster.lease import EXIT_FENCED, Lease
from cluster.logs import EventLog
from cluster.messages.workers import WorkerFailed
from tests.cluster.cluster_rig import KEY, Rig, wait_for_status
from tests.cluster.launches import make_launch

LOG = EventLog("test-lease")
SOON_S = 10.0


class Rank:
    """One whose process does not really end."""

    def __init__(self, launch: WorkerLaunch, stop_wait_s: float = 0.05) -> None:
        self.codes: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.lease = Lease(launch, LOG, end=self.codes.put, stop_wait_s=stop_wait_s)

    def ends(self) -> int:
        return self.codes.get(timeout=SOON_S)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with Rig(tmp_path) as rig:
        rig.start_worker()
        yield rig


def lose_group(rig: Rig) -> None:
    client, supervisor = rig.client(), rig.supervisor()
    supervisor.send(WorkerFailed(group=0, epoch=1, rank=0, message="its peer is gone"))
    wait_for_status(client, lambda status: status.state == "failed")


def wait_for_leases(rig: Rig, count: int) -> None:
    deadline = time.monotonic() + SOON_S
    while len(rig.engine._back._leases) != count:
        assert time.monotonic() < deadline
        rig.client().status()


def test_a_stuck_rank_of_a_lost_group_ends(rig: Rig) -> None:
    rank = Rank(make_launch(address=rig.back, key=KEY))
    with rank.lease:
        wait_for_leases(rig, 1)
        lose_group(rig)
        assert rank.ends() == EXIT_FENCED


def test_a_rank_that_ends_in_order_is_left_to_it(rig: Rig) -> None:
    rank = Rank(make_launch(address=rig.back, key=KEY), stop_wait_s=SOON_S)
    with rank.lease:
        wait_for_leases(rig, 1)
        lose_group(rig)
    assert rank.codes.empty()
    assert rig.client().status().totals.num_dropped == 0


def test_leases_of_other_groups_go_on(tmp_path: Path) -> None:
    with Rig(tmp_path, num_groups=2) as rig:
        rig.start_worker(group=0)
        rig.start_worker(group=1)
        client, supervisor = rig.client(), rig.supervisor()
        wait_for_status(client, lambda s: all(g.state == "ready" for g in s.groups))
        lost, other = (Rank(make_launch(address=rig.back, key=KEY, group=g)) for g in (0, 1))
        with lost.lease, other.lease:
            wait_for_leases(rig, 2)
            supervisor.send(WorkerFailed(group=0, epoch=1, rank=0, message="boom"))
            assert lost.ends() == EXIT_FENCED
            wait_for_leases(rig, 1)
            assert other.codes.empty()


def test_a_rank_that_cannot_reach_its_engine_ends_if_it_is_stuck(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.start_worker()
        launch = make_launch(address=rig.back, key=KEY)
        stuck = Rank(replace(launch, engine_timeout_s=0.2))
        listening = Rank(replace(launch, engine_timeout_s=0.2))
        listening.lease.set_listening(True)
        stuck.lease.__enter__()
        listening.lease.__enter__()
        wait_for_leases(rig, 2)
    try:
        assert stuck.ends() == EXIT_FENCED
        assert listening.codes.empty()
    finally:
        stuck.lease.__exit__(None, None, None)
        listening.lease.__exit__(None, None, None)


def test_a_stranger_gets_no_lease(rig: Rig) -> None:
    rank = Rank(make_launch(address=rig.back, key="another"))
    with rank.lease:
        assert rank.ends() == EXIT_FENCED
    assert not rig.engine._back._leases
