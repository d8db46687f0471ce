"""Pipes between stages: what is sent comes, nobody waits for a whole step, and errors say who."""

import itertools
from collections.abc import Callable

import pytest
import torch

from tests.worker import pipe_tasks, rank_tasks
from tests.worker.rank_processes import Raised, RankProcesses
from worker.meeting import Company, Terms, meet_group
from worker.parallel import MeetingPoint
from worker.parallel_errors import MeetingFailed

KINDS = ["shared", "gloo", "torch"]
NAMES = (f"test-pipeline-{number}" for number in itertools.count())

Meet = Callable[[str], MeetingPoint]


@pytest.fixture
def meet(ranks: RankProcesses) -> Meet:
    """Makes a new meeting point for one kind of pipe."""

    def make(kind: str) -> MeetingPoint:
        name = f"{next(NAMES)}-{id(ranks)}"
        if kind == "shared":
            return MeetingPoint(name=name)
        ranks.start(0, rank_tasks.listen_here)
        port = ranks.answer(0)
        assert isinstance(port, int)
        return MeetingPoint(name=name, host="127.0.0.1", port=port)

    return make


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_stage_sends_comes_to_the_next_one_in_order(
    ranks: RankProcesses, meet: Meet, kind: str, size: int
) -> None:
    kinds = ranks.run(pipe_tasks.check_passing, size, kind, meet(kind))

    pipe = {"shared": "SharedMemoryPipe", "gloo": "GlooPipe", "torch": "NcclPipe"}[kind]
    assert kinds[0] == ["SingleRank", pipe]
    assert kinds[-1] == ["SingleRank", pipe]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "stage", "pipe"),
    [
        ((0, 0, 0, 0), "SharedMemoryCommunicator", "SharedMemoryPipe"),
        ((0, 0, 1, 1), "SharedMemoryCommunicator", "GlooPipe"),
        ((0, 1, 0, 1), "GlooCommunicator", "SharedMemoryPipe"),
        ((0, 1, 2, 3), "GlooCommunicator", "GlooPipe"),
    ],
    ids=str,
)
def test_each_two_that_share_a_host_share_memory(
    ranks: RankProcesses, meet: Meet, nodes: tuple[int, ...], stage: str, pipe: str
) -> None:
    kinds = ranks.run(pipe_tasks.check_passing, 4, "gloo", meet("gloo"), 2, nodes)

    assert kinds == [[stage, pipe]] * 4


@pytest.mark.slow
def test_stages_of_several_gpus_have_groups_of_their_own(ranks: RankProcesses, meet: Meet) -> None:
    kinds = ranks.run(pipe_tasks.check_passing, 4, "torch", meet("torch"), 2)

    assert kinds == [["NcclCommunicator", "NcclPipe"]] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_two_steps_are_sent_before_anybody_takes_the_first(
    ranks: RankProcesses, meet: Meet, kind: str
) -> None:
    meeting = meet(kind)
    ranks.start(0, pipe_tasks.send_ahead, kind, meeting, 2, 600.0)
    ranks.start(1, pipe_tasks.take_when_told, kind, meeting, 600.0)

    assert [ranks.answer(0), ranks.answer(0)] == [1, 2]
    ranks.tell(1, 2)
    assert ranks.answer(1) == [1.0, 2.0]
    for rank in range(2):
        ranks.tell(rank, "leave")
        ranks.answer(rank)


@pytest.mark.parametrize("kind", ["shared", "gloo"])
def test_a_stage_that_takes_nothing_is_named_after_the_time_limit(
    ranks: RankProcesses, meet: Meet, kind: str
) -> None:
    meeting = meet(kind)
    ranks.start(0, pipe_tasks.send_ahead, kind, meeting, 3, 0.3)
    ranks.start(1, pipe_tasks.take_when_told, kind, meeting, 600.0)

    assert [ranks.answer(0), ranks.answer(0)] == [1, 2]
    late = ranks.answer(0)
    ranks.tell(1, 0)
    assert ranks.answer(1) == []
    ranks.tell(1, "leave")
    ranks.answer(1)

    assert isinstance(late, Raised)
    assert (late.kind, late.peer, late.step) == ("CollectiveTimeout", 1, 3)
    assert "stage 0 waited 0.3 s for stage 1 (rank 1)" in late.message


@pytest.mark.parametrize("kind", ["shared", pytest.param("gloo", marks=pytest.mark.slow)])
def test_a_stage_whose_process_is_killed_is_named_long_before_the_time_limit(
    ranks: RankProcesses, meet: Meet, kind: str
) -> None:
    meeting = meet(kind)
    ranks.start(0, pipe_tasks.send_ahead, kind, meeting, 1, 600.0)
    ranks.start(1, pipe_tasks.take_when_told, kind, meeting, 600.0)
    assert ranks.answer(0) == 1
    ranks.tell(1, 2)
    ranks.kill(0)
    lost = ranks.answer(1)

    assert isinstance(lost, Raised)
    assert (lost.kind, lost.peer) == ("PeerLost", 0)
    assert lost.step in (1, 2)  # what it sent may be lost with it
    assert "stage 1 lost stage 0 (rank 0)" in lost.message


def test_stages_on_several_hosts_without_an_address_are_refused() -> None:
    company = Company(rank=1, num_stages=2, ranks_per_stage=1, nodes=(0, 1))
    terms = Terms(device=torch.device("cpu"), step_bytes=4096, start_timeout_s=1.0, timeout_s=1.0)

    with pytest.raises(MeetingFailed, match=r"2 ranks on cpu, on hosts \(0, 1\), .* got host ''"):
        meet_group(MeetingPoint(name="nowhere"), company, terms)
