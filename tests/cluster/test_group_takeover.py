"""A group at the engine that comes after another: in which order whatever happens, it serves or
is lost, and nothing makes it wait for ever."""

import copy
import itertools
from collections.abc import Callable
from typing import Literal

import pytest

from cluster.engine_launch import GroupEpoch
from cluster.group_instructions import Instruction, LetLoad, Lose, Refuse, Serve, SizePool, Start
from cluster.groups import RestartPolicy, WorkerGroup
from tests.cluster.test_groups import make_greeting, make_hello, peer

EPOCH = 3


def make_group(before: GroupEpoch, max_restarts: int = 1) -> WorkerGroup:
    return WorkerGroup(
        0,
        2,
        start_timeout_s=300.0,
        policy=RestartPolicy(max_restarts=max_restarts),
        now=0.0,
        before=before,
        takeover_s=30.0,
    )


def ready_before() -> GroupEpoch:
    return GroupEpoch(0, EPOCH, "ready", was_ready=True)


def greet(group: WorkerGroup, rank: int, now: float = 1.0) -> list[Instruction]:
    return group.greet(peer(rank, EPOCH), make_greeting(rank, epoch=EPOCH), "", now)


def hello(group: WorkerGroup, rank: int, now: float = 1.0) -> list[Instruction]:
    return group.hello(peer(rank, EPOCH), make_hello(rank, epoch=EPOCH), now)


def test_ranks_that_come_back_serve_under_the_same_epoch() -> None:
    group = make_group(ready_before())

    assert greet(group, 1) == []
    assert greet(group, 0) == [LetLoad(0, (peer(1, EPOCH), peer(0, EPOCH)))]
    assert hello(group, 0) == []
    assert hello(group, 1) == [SizePool(0, (peer(0, EPOCH), peer(1, EPOCH)), 10)]
    assert group.ready(peer(0, EPOCH), 1.0) == []
    assert group.ready(peer(1, EPOCH), 1.0) == [Serve(0, EPOCH, 10)]
    assert group.next_deadline is None


def test_a_rank_that_does_not_come_back_loses_the_group_which_restarts() -> None:
    group = make_group(ready_before())
    for rank in (0, 1):
        greet(group, rank)
    hello(group, 1)
    assert group.next_deadline == 30.0

    (lost,) = group.tick(30.0)

    assert isinstance(lost, Lose)
    assert (lost.epoch, lost.rank, lost.restarts) == (EPOCH, 0, True)
    assert lost.message == "ranks [0] did not come to the new engine within takeover_s=30"
    assert group.stopped(EPOCH, 31.0) == []
    assert group.tick(60.0) == [Start(0, EPOCH + 1)]


def test_a_group_that_was_starting_has_the_time_of_a_start() -> None:
    group = make_group(GroupEpoch(0, EPOCH, "starting"))
    assert group.next_deadline == 300.0
    (lost,) = group.tick(300.0)
    assert isinstance(lost, Lose)
    assert not lost.restarts


@pytest.mark.parametrize("state", ["stopped", "retired"])
def test_a_group_that_has_left_stays_away_and_may_come_back(
    state: Literal["stopped", "retired"],
) -> None:
    group = make_group(GroupEpoch(0, EPOCH, state))
    assert (group.state, group.next_deadline, group.has_hope) == (state, None, False)
    assert [type(each) for each in greet(group, 0)] == [Refuse]
    assert group.come_back(1.0) == [Start(0, EPOCH + 1)]


def test_a_rank_that_greets_again_lets_only_itself_load() -> None:
    group = make_group(ready_before())
    greet(group, 0)
    greet(group, 1)
    again = group.greet(b"again", make_greeting(0, epoch=EPOCH), "", 2.0)
    assert again == [LetLoad(0, (b"again",))]


Event = Callable[[WorkerGroup], list[Instruction]]

EVENTS: dict[str, Event] = {
    "greet 0": lambda group: greet(group, 0),
    "greet 1": lambda group: greet(group, 1),
    "hello 0": lambda group: hello(group, 0),
    "hello 1": lambda group: hello(group, 1),
    "ready 0": lambda group: group.ready(peer(0, EPOCH), 1.0),
    "ready 1": lambda group: group.ready(peer(1, EPOCH), 1.0),
    "left 0": lambda group: group.left(peer(0, EPOCH), 1.0),
    "died 1": lambda group: group.failed(EPOCH, 1, "killed", now=1.0),
    "over": lambda group: group.stopped(EPOCH, 1.0),
}


def test_in_every_order_it_serves_once_or_is_lost_once_and_has_a_way_on() -> None:
    ends = set()
    for order in itertools.permutations(EVENTS, 5):
        group, given = make_group(ready_before()), list[Instruction]()
        for name in order:
            given += EVENTS[name](group)
        serves = sum(isinstance(each, Serve) for each in given)
        losses = sum(isinstance(each, Lose) for each in given)
        assert serves <= 1
        assert losses <= 1
        ends.add(group.state)
        if group.state == "lost":  # whoever was told to end its processes says so
            later = copy.deepcopy(group)
            later.stopped(EPOCH, 2.0)
            assert later.state == "waiting"
            assert later.tick(100.0) == [Start(0, EPOCH + 1)]
        elif group.state != "ready":
            assert group.next_deadline is not None, order
            assert group.tick(1000.0), order
    assert ends == {"starting", "sizing", "ready", "lost", "waiting"}
