"""Collectives over TCP: what is said when a rank is late, gone or unreachable."""

import socket

import pytest

from tests.worker import rank_tasks
from tests.worker.rank_processes import Raised, RankProcesses
from worker.meeting_store import address_towards, listen, open_store
from worker.parallel import MeetingPoint
from worker.parallel_errors import MeetingFailed


@pytest.fixture
def meeting(ranks: RankProcesses) -> MeetingPoint:
    ranks.start(0, rank_tasks.listen_here)
    port = ranks.answer(0)
    assert isinstance(port, int)
    return MeetingPoint(name="unused", host="127.0.0.1", port=port)


def test_a_rank_that_stays_away_is_named_after_the_time_limit_and_the_group_stays_broken(
    ranks: RankProcesses, meeting: MeetingPoint
) -> None:
    ranks.start(0, rank_tasks.fail_twice, 2, "gloo", meeting)
    ranks.start(1, rank_tasks.sum_when_told, 2, "gloo", meeting, 0.3)
    said = ranks.answer(0)
    ranks.tell(1, "sum")
    late = ranks.answer(1)

    assert isinstance(said, tuple)
    first, second = said
    assert first.startswith(
        "CollectiveTimeout: rank 0, step 41, collective 1: waited 0.3 s for rank 1"
    )
    assert second == first
    assert isinstance(late, Raised)
    assert late.kind in ("PeerLost", "CollectiveTimeout")
    assert late.peer == 0


def test_a_killed_rank_is_named_to_the_others_long_before_the_time_limit(
    ranks: RankProcesses, meeting: MeetingPoint
) -> None:
    for rank in range(2):
        ranks.start(rank, rank_tasks.sum_once, 3, "gloo", meeting, 600.0, 2)
    ranks.start(2, rank_tasks.sum_when_told, 3, "gloo", meeting, 600.0)
    ranks.tell(2, "sum")
    for rank in range(2):
        assert [ranks.answer(rank), ranks.answer(rank)] == [1, 2]
    ranks.kill(2)

    for rank in range(2):
        lost = ranks.answer(rank)
        assert isinstance(lost, Raised)
        assert (lost.kind, lost.step) == ("PeerLost", 2)
        assert lost.peer in {0, 1, 2} - {rank}  # the first to fail leaves, too
        assert f"the connection to rank {lost.peer} is broken" in lost.message


def test_ranks_in_different_collectives_do_not_understand_each_other(
    ranks: RankProcesses, meeting: MeetingPoint
) -> None:
    first, second = ranks.run(rank_tasks.sum_or_broadcast, 2, "gloo", meeting, 0.5)

    assert isinstance(first, str)
    assert first.startswith(("CollectiveTimeout: rank 0, step 7", "PeerLost: rank 0, step 7"))
    assert isinstance(second, str)
    assert second.startswith(("CollectiveTimeout: rank 1, step 8", "PeerLost: rank 1, step 8"))


def test_a_rank_that_does_not_come_fails_the_start_of_the_others(
    ranks: RankProcesses, meeting: MeetingPoint
) -> None:
    ranks.start(0, rank_tasks.meet_alone, 2, meeting)

    said = ranks.answer(0)

    assert isinstance(said, str)
    assert said.startswith("MeetingFailed: rank 0 of 2, reached at 127.0.0.1, did not connect")


def test_the_name_of_this_host_is_not_asked_for(
    ranks: RankProcesses, meeting: MeetingPoint
) -> None:
    """It often resolves to loopback, or to nothing; gloo is given an address instead."""
    store, gloo = meeting.host, "127.0.0.9"

    assert ranks.run(rank_tasks.addresses_in_use, 2, meeting, gloo) == [{store, gloo}, {gloo}]


def test_a_port_in_use_is_named() -> None:
    with listen("127.0.0.1") as first:
        port = first.getsockname()[1]

        with pytest.raises(MeetingFailed, match=f"cannot listen on 127.0.0.1:{port}: Address"):
            listen("127.0.0.1", port)


def test_an_address_of_another_host_is_named() -> None:
    with pytest.raises(MeetingFailed, match=r"cannot listen on 192\.0\.2\.1:0: .*rank 0 runs on"):
        listen("192.0.2.1")  # reserved for documentation, RFC 5737


def test_a_meeting_point_where_nobody_listens_is_named() -> None:
    with listen("127.0.0.1") as closed:
        port = closed.getsockname()[1]

    with pytest.raises(MeetingFailed, match=f"rank 1 did not reach rank 0 at 127.0.0.1:{port}"):
        open_store("127.0.0.1", port, rank=1, size=2, timeout_s=0.2)


def test_rank_0_listens_on_the_given_address_alone() -> None:
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    store = open_store("127.0.0.1", port, rank=0, size=2, timeout_s=5, listener=listener)
    store.set("is", "there")

    with socket.socket() as stranger, pytest.raises(ConnectionRefusedError):
        stranger.connect(("127.0.0.2", port))
    with socket.socket() as friend:
        friend.connect(("127.0.0.1", port))


def test_the_address_towards_a_host_is_the_one_that_routes_there() -> None:
    assert address_towards("127.0.0.5", 1) == "127.0.0.1"
    with pytest.raises(MeetingFailed, match=r"no route to rank 0 at no-such-host\.invalid:1"):
        address_towards("no-such-host.invalid", 1)
