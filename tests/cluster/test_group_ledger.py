"""What a new engine is told of the groups, whenever the old one ends."""

from cluster.engine_launch import GroupEpoch
from cluster.group_ledger import GroupLedger
from cluster.messages.supervisor import GroupStopped
from cluster.messages.workers import WorkerFailed


def failure(epoch: int = 1, rank: int = 0) -> WorkerFailed:
    return WorkerFailed(group=0, epoch=epoch, rank=rank, message="killed")


def test_groups_are_where_they_were() -> None:
    ledger = GroupLedger()
    for group in range(4):
        ledger.begins(group, 1)
    for group in (1, 2, 3):
        ledger.ready(group, 1)
    ledger.lost(2, 1, restarts=False)
    ledger.retired(3, 1)

    assert ledger.epochs() == (
        GroupEpoch(0, 1, "starting"),
        GroupEpoch(1, 1, "ready", was_ready=True),
        GroupEpoch(2, 1, "stopped", was_ready=True),
        GroupEpoch(3, 1, "retired"),
    )
    assert (ledger.num_wanted, ledger.num_ready) == (2, 1)
    assert ledger.news() == []


def test_a_restarted_group_may_restart_again_under_its_next_epoch() -> None:
    ledger = GroupLedger()
    ledger.begins(0, 1)
    ledger.ready(0, 1)
    ledger.failed(failure())
    ledger.lost(0, 1, restarts=True)
    ledger.over(0, 1)
    assert ledger.epochs() == (GroupEpoch(0, 1, "starting", was_ready=True),)
    assert ledger.news() == [failure(), GroupStopped(0, 1)]

    ledger.begins(0, 2)
    assert ledger.epochs() == (GroupEpoch(0, 2, "starting", was_ready=True),)
    assert ledger.news() == []


def test_a_rank_that_dies_while_there_is_no_engine_is_told_to_the_next() -> None:
    ledger = GroupLedger()
    ledger.begins(0, 1)
    ledger.ready(0, 1)
    ledger.failed(failure(rank=1))
    assert ledger.epochs() == (GroupEpoch(0, 1, "ready", was_ready=True),)
    assert ledger.news() == [failure(rank=1)]


def test_news_of_an_older_epoch_or_of_no_group_is_nothing() -> None:
    ledger = GroupLedger()
    ledger.failed(failure())
    ledger.begins(0, 2)
    ledger.failed(failure(epoch=1))
    ledger.over(0, 1)
    ledger.ready(0, 1)
    ledger.lost(0, 1, restarts=False)
    ledger.retired(0, 1)
    assert ledger.epochs() == (GroupEpoch(0, 2, "starting"),)
    assert ledger.news() == []


def test_a_group_that_comes_back_begins_anew() -> None:
    ledger = GroupLedger()
    ledger.begins(0, 1)
    ledger.ready(0, 1)
    ledger.retired(0, 1)
    ledger.over(0, 1)
    ledger.begins(0, 2)
    assert ledger.epochs() == (GroupEpoch(0, 2, "starting"),)
    assert ledger.num_wanted == 1


def test_a_group_that_is_renewed_is_wanted_all_the_time() -> None:
    ledger = GroupLedger()
    ledger.begins(0, 1)
    ledger.ready(0, 1)
    ledger.retired(0, 1, comes_back=True)
    assert ledger.num_wanted == 1
    ledger.over(0, 1)
    assert ledger.epochs() == (GroupEpoch(0, 1, "starting", was_ready=True),)
    assert ledger.news() == [GroupStopped(0, 1)]
