"""What is made of a cluster's statuses after a fault, and which faults are drawn."""

import random

import pytest

from cluster.messages.reports import GroupStatus, RankStatus, Status
from stoker.chaos.orders import RECIPES, Drawer, Order, Shape
from stoker.chaos.storm import FaultReport
from stoker.chaos.watch import Fate, Moment, fate_in, moment_of, shape_of

SHAPE = Shape((0, 1), 2, ("a", "b"))
READY = (1, "ready")
GROUP_1 = frozenset({1})


def history(*groups: tuple[tuple[int, str], ...], engine_id: str = "e") -> list[Moment]:
    """One moment per second from 0 on."""
    return [
        Moment(float(at), engine_id, dict(enumerate(states))) for at, states in enumerate(groups)
    ]


def test_a_loss_is_noticed_when_its_group_shows_it_and_mended_when_all_are_ready() -> None:
    moments = history(
        (READY, READY), (READY, (1, "lost")), ((1, "lost"), (2, "ready")), ((2, "ready"),) * 2
    )
    assert fate_in(moments, 0.5, GROUP_1, hits_engine=False) == Fate(0.5, 2.5)


def test_what_another_group_shows_is_not_of_this_fault() -> None:
    moments = history((READY, READY), ((1, "lost"), READY), (READY, READY))
    assert fate_in(moments, 0.5, GROUP_1, hits_engine=False) == Fate()


def test_a_restart_between_two_looks_shows_in_the_epoch() -> None:
    moments = history((READY, READY), (READY, (2, "ready")))
    assert fate_in(moments, 0.5, GROUP_1, hits_engine=False) == Fate(0.5, 0.5)


def test_a_cluster_that_is_not_whole_again_stays_noticed() -> None:
    moments = history((READY, READY), (READY, (1, "stopped")))
    fate = fate_in(moments, 0.5, GROUP_1, hits_engine=False)
    assert fate == Fate(0.5, None)
    assert FaultReport(what="kill", where="here", noticed_s=fate.noticed_s).is_broken


def test_the_engines_death_shows_in_its_silence_and_another_one_is_another() -> None:
    moments = [
        *history((READY,)),
        Moment(1.0),
        Moment(2.0, "f", {0: (1, "starting")}),
        Moment(3.0, "f", {0: READY}),
    ]
    assert fate_in(moments, 0.5, frozenset(), hits_engine=True) == Fate(0.5, 2.5)
    assert fate_in(moments, 0.5, frozenset({0}), hits_engine=False).noticed_s == 1.5


def test_what_shows_after_the_next_fault_is_not_of_one_that_may_show_nothing() -> None:
    moments = history((READY, READY), (READY, READY), (READY, (1, "lost")))
    assert fate_in(moments, 0.5, GROUP_1, hits_engine=False, until=1.5) == Fate()


def test_groups_that_leave_are_not_waited_for() -> None:
    ranks = (RankStatus(rank=0, state="ready", host="a"), RankStatus(rank=1, state="ready"))
    status = Status(
        engine_id="e",
        model="m",
        state="serving",
        uptime_s=1.0,
        groups=(
            GroupStatus(group=0, epoch=1, state="ready", ranks=ranks),
            GroupStatus(group=1, epoch=3, state="retired"),
        ),
    )
    assert moment_of(1.0, status).is_whole
    assert shape_of(status) == Shape((0,), 2, ("", "a"))
    assert not moment_of(1.0, None).is_whole


def drawn(seed: int, count: int = 400, **limits: object) -> list[Order]:
    drawer = Drawer(random.Random(seed), **limits)  # type: ignore[arg-type]
    return [drawer.draw(SHAPE) for _ in range(count)]


def test_the_same_seed_draws_the_same_faults_of_every_recipe() -> None:
    assert drawn(3) == drawn(3) != drawn(4)
    assert {order.name for order in drawn(3)} == {recipe.name for recipe in RECIPES}
    assert {order.asked.rank for order in drawn(3)} == {-1, 0, 1}


@pytest.mark.parametrize("kinds", [{"kill"}, {"full", "cut"}])
def test_only_what_is_asked_for_is_drawn(kinds: set[str]) -> None:
    orders = drawn(0, kinds=kinds, with_engine=False)
    assert {order.asked.fault.kind for order in orders} == kinds
    assert not any(order.hits_engine for order in orders)
