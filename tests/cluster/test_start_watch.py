"""What a start says that it waits for."""

from cluster.messages.workers import RankPhase
from cluster.start_watch import StartWatch


def make_phase(
    phase: str, *, group: int = 0, epoch: int = 1, rank: int = 0, done: int = 0, total: int = 0
) -> RankPhase:
    return RankPhase(
        group=group, epoch=epoch, rank=rank, node="n2", phase=phase, done=done, total=total
    )


def texts(watch: StartWatch, now: float) -> list[str]:
    return [wait.text() for wait in watch.waits(now)]


def test_a_group_without_room_waits_for_room() -> None:
    watch = StartWatch(num_ranks=2)
    watch.begins(1, 1, 0.0)
    assert texts(watch, 12.0) == [
        "group 1 waits for room, or for its processes to start (for 12 s)"
    ]


def test_each_rank_is_told_with_node_and_bytes_and_since_when_it_has_not_moved() -> None:
    watch = StartWatch(num_ranks=2)
    watch.begins(0, 1, 0.0)
    watch.placed(0, 1, 1.0)
    watch.moved(make_phase("load", rank=1, done=1_000_000, total=4_000_000), 3.0)
    watch.moved(make_phase("load", rank=1, done=2_000_000, total=4_000_000), 5.0)
    watch.moved(make_phase("load", rank=1, done=2_000_000, total=4_000_000), 9.0)

    assert texts(watch, 11.0) == [
        "rank 0.0 has not reached the engine (for 10 s)",
        "rank 0.1 on n2 loads weights: 2 of 4 MB read (for 6 s)",
    ]


def test_lines_come_every_ten_seconds_while_something_is_waited_for_and_never_else() -> None:
    watch = StartWatch(num_ranks=1, every_s=10.0)
    assert watch.next_deadline is None
    watch.expect("ray", "is being brought up", 0.0)
    assert watch.due(9.9) == []
    assert [wait.who for wait in watch.due(10.0)] == ["ray"]
    assert watch.due(10.1) == []
    assert watch.next_deadline == 20.0
    watch.came("ray")
    assert watch.next_deadline is None
    assert watch.due(50.0) == []


def test_a_restart_hours_later_waits_ten_seconds_before_its_first_line_too() -> None:
    watch = StartWatch(num_ranks=1, every_s=10.0)
    watch.begins(0, 1, 0.0)
    watch.ended(0)
    watch.begins(0, 2, 5000.0)
    assert watch.next_deadline == 5010.0


def test_news_of_an_older_epoch_or_of_no_start_is_nothing() -> None:
    watch = StartWatch(num_ranks=1)
    watch.begins(0, 2, 0.0)
    watch.placed(0, 2, 0.0)
    watch.moved(make_phase("load", epoch=1), 1.0)
    watch.moved(make_phase("load", group=7), 1.0)
    watch.placed(0, 1, 5.0)
    assert texts(watch, 1.0) == ["rank 0.0 has not reached the engine (for 1 s)"]
