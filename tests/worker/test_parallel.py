"""What every way of talking between ranks must do, and which one is chosen."""

import itertools
from collections.abc import Callable

import pytest
import torch

from tests.worker import rank_tasks
from tests.worker.rank_processes import RankProcesses
from worker.meeting_store import listen
from worker.parallel import MeetingPoint, SingleRank, join
from worker.parallel_errors import ColumnsMismatch, MeetingFailed

KINDS = ["shared", "gloo", "torch"]
NAMES = (f"test-parallel-{number}" for number in itertools.count())


@pytest.fixture
def meet(ranks: RankProcesses) -> Callable[[str], MeetingPoint]:
    """Makes a new meeting point for one kind of communicator."""

    def make(kind: str) -> MeetingPoint:
        name = f"{next(NAMES)}-{id(ranks)}"
        if kind == "shared":
            return MeetingPoint(name=name)
        ranks.start(0, rank_tasks.listen_here)
        port = ranks.answer(0)
        assert isinstance(port, int)
        return MeetingPoint(name=name, host="127.0.0.1", port=port)

    return make


type_of_meet = Callable[[str], MeetingPoint]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_made_in_rank_order_and_rounded_once(
    ranks: RankProcesses, meet: type_of_meet, kind: str, size: int
) -> None:
    ranks.run(rank_tasks.check_sums, size, kind, meet(kind))


def test_the_order_of_a_sum_shows_in_its_bits() -> None:
    """Or the test above could not fail for a wrong order."""
    parts = [rank_tasks.part_of(rank, 1, (576,), torch.float32) for rank in range(3)]

    assert not torch.equal(rank_tasks.sum_in_order(parts), rank_tasks.sum_in_order(parts[::-1]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_that_is_not_dense_is_summed_into_one_that_is(
    ranks: RankProcesses, meet: type_of_meet, kind: str
) -> None:
    ranks.run(rank_tasks.check_strided_sum, 2, kind, meet(kind))


@pytest.mark.parametrize(
    "widths", [(5, 3), (1, 400), (2048, 2048), (6, 1, 9), (3000, 2999, 1)], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_rank_0_gathers_columns_of_uneven_widths(
    ranks: RankProcesses, meet: type_of_meet, kind: str, widths: tuple[int, ...]
) -> None:
    ranks.run(rank_tasks.check_gathers, len(widths), kind, meet(kind), widths)


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_another_width_than_agreed_are_refused_and_leave_the_group_whole(
    ranks: RankProcesses, meet: type_of_meet, kind: str
) -> None:
    ranks.run(rank_tasks.check_wrong_width, 2, kind, meet(kind))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_hears_what_any_rank_broadcasts(
    ranks: RankProcesses, meet: type_of_meet, kind: str, size: int
) -> None:
    ranks.run(rank_tasks.check_broadcasts, size, kind, meet(kind))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("kind", "count"), [("shared", 2000), ("gloo", 100), ("torch", 100)])
def test_a_long_mixture_of_collectives_stays_in_step(
    ranks: RankProcesses, meet: type_of_meet, kind: str, count: int, size: int
) -> None:
    ranks.run(rank_tasks.check_mixture, size, kind, meet(kind), count)


def test_gloo_and_shared_memory_agree_to_the_bit(ranks: RankProcesses, meet: type_of_meet) -> None:
    ranks.run(rank_tasks.check_agreement, 3, meet("shared"), meet("gloo"))


@pytest.mark.parametrize(
    ("is_one_host", "chosen"), [(True, "SharedMemoryCommunicator"), (False, "GlooCommunicator")]
)
def test_cpu_ranks_share_memory_on_one_host_and_use_gloo_across_hosts(
    ranks: RankProcesses, meet: type_of_meet, is_one_host: bool, chosen: str
) -> None:
    meeting = meet("gloo")

    assert ranks.run(rank_tasks.check_join, 2, meeting, is_one_host) == [chosen, chosen]


def join_alone(**changes: object) -> object:
    settings: dict[str, object] = {
        "meeting": MeetingPoint(name="alone"),
        "rank": 0,
        "size": 1,
        "device": torch.device("cpu"),
        "is_one_host": True,
        "start_timeout_s": 1.0,
        "timeout_s": 1.0,
    }
    return join(**{**settings, **changes})  # type: ignore[arg-type]


def test_a_single_rank_talks_to_nobody() -> None:
    alone = join_alone()
    part = torch.arange(6.0).view(2, 3)

    assert isinstance(alone, SingleRank)
    assert alone.all_reduce(part) is part
    assert alone.gather_columns(part, [3]) is part
    assert alone.broadcast(part) is part
    with pytest.raises(ColumnsMismatch, match=r"widths \[4\], .* shape \[2, 3\]"):
        alone.gather_columns(part, [4])
    with pytest.raises(ValueError, match="rank 1 cannot broadcast"):
        alone.broadcast(part, source=1)


def test_a_listener_that_nobody_needs_is_closed() -> None:
    listener = listen("127.0.0.1")

    join_alone(listener=listener)

    assert listener.fileno() == -1


def test_ranks_across_hosts_without_an_address_are_refused() -> None:
    with pytest.raises(MeetingFailed, match="2 ranks on cpu, one host: False"):
        join_alone(size=2, is_one_host=False)
