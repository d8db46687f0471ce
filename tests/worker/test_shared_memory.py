"""Collectives through shared memory: what can go wrong, and what a wait costs."""

import itertools
import os
import signal
from pathlib import Path

import pytest

from tests.worker import rank_tasks
from tests.worker.rank_processes import Raised, RankProcesses
from worker.parallel import MeetingPoint

NUMBERS = itertools.count()


@pytest.fixture
def meeting() -> MeetingPoint:
    return MeetingPoint(name=f"test-shared-memory-{os.getpid()}-{next(NUMBERS)}")


def test_every_16_bit_number_is_widened_and_rounded_as_torch_does(
    ranks: RankProcesses, meeting: MeetingPoint
) -> None:
    ranks.run(rank_tasks.check_every_half, 2, "shared", meeting)


def test_a_wait_sleeps_instead_of_burning_a_core(
    ranks: RankProcesses, meeting: MeetingPoint
) -> None:
    for rank in range(2):
        ranks.start(rank, rank_tasks.wait_long, 2, meeting)
    assert ranks.answer(0) == "asleep"
    ranks.tell(1, "come")

    cost = ranks.answer(0)
    ranks.answer(1)

    assert isinstance(cost, tuple)
    cpu_s, wall_s = cost
    assert cpu_s < wall_s / 4, f"{cpu_s} s of computing in a wait of {wall_s} s"


@pytest.mark.parametrize("kind", ["shared"])
def test_a_rank_that_stays_away_is_named_after_the_time_limit_and_the_group_stays_broken(
    ranks: RankProcesses, meeting: MeetingPoint, kind: str
) -> None:
    ranks.start(0, rank_tasks.fail_twice, 3, kind, meeting)
    ranks.start(1, rank_tasks.fail_twice, 3, kind, meeting)
    ranks.start(2, rank_tasks.sum_when_told, 3, kind, meeting, 5.0)
    said = [ranks.answer(0), ranks.answer(1)]
    ranks.tell(2, "sum")
    late = ranks.answer(2)

    for rank, both in enumerate(said):
        assert isinstance(both, tuple)
        first, second = both
        assert first.startswith(f"CollectiveTimeout: rank {rank}, step 41, collective 1: ")
        assert "all_reduce of 32 bytes" in first
        assert "waited 0.3 s for rank 2" in first
        assert second.startswith(f"CollectiveTimeout: rank {rank}, step 41, collective 2: ")
    assert isinstance(late, Raised)
    assert (late.kind, late.peer) == ("CollectiveTimeout", 2)


def test_a_killed_rank_is_named_to_all_others_long_before_the_time_limit(
    ranks: RankProcesses, meeting: MeetingPoint
) -> None:
    for rank in range(2):
        ranks.start(rank, rank_tasks.sum_once, 3, "shared", meeting, 600.0, 2)
    ranks.start(2, rank_tasks.sum_when_told, 3, "shared", meeting, 600.0)
    ranks.tell(2, "sum")
    for rank in range(2):
        assert [ranks.answer(rank), ranks.answer(rank)] == [1, 2]
    ranks.kill(2)

    for rank in range(2):
        lost = ranks.answer(rank)
        assert isinstance(lost, Raised)
        assert (lost.kind, lost.peer, lost.step) == ("PeerLost", 2, 2)
        assert "the process of rank 2 has ended" in lost.message


def test_a_rank_that_leaves_early_fails_those_who_still_need_it(
    ranks: RankProcesses, meeting: MeetingPoint
) -> None:
    ranks.start(0, rank_tasks.sum_once, 2, "shared", meeting, 600.0, 2)
    ranks.start(1, rank_tasks.sum_once, 2, "shared", meeting, 600.0, 1)
    ranks.answer(1), ranks.answer(0), ranks.answer(0)

    lost = ranks.answer(0)

    assert ranks.answer(1) is None
    assert isinstance(lost, Raised)
    assert (lost.kind, lost.peer) == ("PeerLost", 1)
    assert "rank 1, which has closed" in lost.message


def test_ranks_in_different_collectives_are_told_both(
    ranks: RankProcesses, meeting: MeetingPoint
) -> None:
    first, second = ranks.run(rank_tasks.sum_or_broadcast, 2, "shared", meeting, 5.0)

    assert isinstance(first, str)
    assert first.startswith("OutOfStep: rank 0, step 7, collective 1: all_reduce of 32 bytes")
    assert "rank 1 out of step: it is in broadcast of 32 bytes from rank 1, step 8" in first
    assert isinstance(second, str)
    assert second.startswith("OutOfStep: rank 1, step 8, collective 2: ")


def test_an_interrupt_ends_a_wait_at_once_and_the_group_with_it(
    ranks: RankProcesses, meeting: MeetingPoint
) -> None:
    ranks.start(0, rank_tasks.sum_once, 2, "shared", meeting, 600.0, 1)
    ranks.start(1, rank_tasks.sum_when_told, 2, "shared", meeting, 600.0)
    assert ranks.answer(0) == 1
    os.kill(ranks.pid(0), signal.SIGINT)
    interrupted = ranks.answer(0)
    ranks.tell(1, "sum")
    lost = ranks.answer(1)

    assert isinstance(interrupted, Raised)
    assert interrupted.kind == "KeyboardInterrupt"
    assert isinstance(lost, Raised)
    assert (lost.kind, lost.peer) == ("PeerLost", 0)


def test_memory_that_the_system_refuses_is_an_error_and_not_a_signal(
    ranks: RankProcesses, meeting: MeetingPoint
) -> None:
    ranks.start(1, rank_tasks.sum_once, 2, "shared", meeting, 5.0, 1)
    ranks.start(0, rank_tasks.meet_without_memory, 2, meeting)

    refused, turned_away = ranks.answer(0), ranks.answer(1)

    assert isinstance(refused, str)
    assert refused.startswith("MeetingFailed: wanted 26")
    assert "bytes of memory to share" in refused
    assert isinstance(turned_away, Raised)
    assert turned_away.kind == "MeetingFailed"


def test_a_group_that_ends_gives_all_its_files_back(
    ranks: RankProcesses, meeting: MeetingPoint
) -> None:
    before = ranks.run(rank_tasks.open_files, 2)

    ranks.run(rank_tasks.check_strided_sum, 2, "shared", meeting)

    assert ranks.run(rank_tasks.open_files, 2) == before


def test_a_killed_group_leaves_nothing_because_its_memory_and_socket_have_no_names(
    ranks: RankProcesses, meeting: MeetingPoint
) -> None:
    for rank in range(2):
        ranks.start(rank, rank_tasks.sum_when_told, 2, "shared", meeting, 5.0)
        ranks.tell(rank, "sum")
    assert [ranks.answer(rank) for rank in range(2)] == ["summed", "summed"]
    mapped = [Path(f"/proc/{ranks.pid(rank)}/maps").read_text() for rank in range(2)]
    ranks.kill(0)
    ranks.kill(1)

    assert all(f"/memfd:{meeting.name}" in maps for maps in mapped)
    assert all("/dev/shm/" not in maps for maps in mapped)
    assert meeting.name not in Path("/proc/net/unix").read_text()
    assert not [name for name in os.listdir("/dev/shm") if meeting.name in name]
