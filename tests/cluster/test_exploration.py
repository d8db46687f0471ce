"""Every order of what may happen to groups and requests, for small worlds, without I/O.

Breadth first over states: each is reached by playing its events from the beginning, and events
that lead to a state that was seen before are not followed further. What must hold in every state
is in `World.check`; that every state has a way out is shown by letting everybody do their duty.
"""

from collections import deque
from collections.abc import Callable, Iterable

import pytest

from tests.cluster.explored import DUTIES, Event, World

MOST_DUTIES = 200


def played(make: Callable[[], World], events: Iterable[Event]) -> World:
    world = make()
    for event in events:
        world.do(event)
    return world


def duty(world: World) -> Event | None:
    """What would happen next if nothing went wrong any more."""
    enabled = world.enabled()
    for what in DUTIES:
        for event in enabled:
            if event[0] == what:
                return event
    return None


def come_to_rest(world: World, known_good: set[object]) -> None:
    """Let everybody do their duty until all requests have ended and nothing is held."""
    passed: list[object] = []
    for _ in range(MOST_DUTIES):
        digest = world.digest()
        if digest in known_good or world.is_settled():
            known_good.update(passed)
            known_good.add(digest)
            return
        passed.append(digest)
        event = duty(world)
        assert event is not None, f"no way out of {digest}"
        world.do(event)
    raise AssertionError(f"it does not come to rest: {world.digest()}")


def explore(make: Callable[[], World]) -> tuple[set[object], set[str]]:
    """All states that any order of events reaches, and the kinds of events that were tried."""
    frontier: deque[tuple[Event, ...]] = deque([()])
    seen: set[object] = {make().digest()}
    known_good: set[object] = set()
    kinds: set[str] = set()
    while frontier:
        history = frontier.popleft()
        for event in played(make, history).enabled():
            so_far = (*history, event)
            try:
                world = played(make, so_far)
                digest = world.digest()
                if digest in seen:
                    continue
                seen.add(digest)
                frontier.append(so_far)
                kinds.add(event[0])
                come_to_rest(world, known_good)
            except AssertionError as error:
                raise AssertionError(f"after {so_far}: {error}") from error
    return seen, kinds


def check_all(budget: dict[str, int], *, num_groups: int, num_requests: int) -> set[str]:
    """Explore a world in which so much may happen beside duties; returns the kinds of events."""

    def make() -> World:
        return World(num_groups=num_groups, num_requests=num_requests, budget=budget)

    seen, kinds = explore(make)
    assert len(seen) > 30
    assert set(budget) <= kinds
    return kinds


def test_no_order_of_a_death_and_answers_loses_or_doubles_a_token() -> None:
    kinds = check_all({"die": 1}, num_groups=1, num_requests=1)

    assert {"ended", "late", "greet", "load", "serve", "answer", "tick"} <= kinds


INNOCENT = [
    ({"cut": 1, "node": 1}, 1, 1),
    ({"node": 2}, 1, 1),
    ({"told to end": 2}, 1, 1),
    pytest.param({"cut": 2, "node": 1}, 1, 1, marks=pytest.mark.slow),
    pytest.param({"cut": 1, "node": 1, "hand over": 1}, 1, 1, marks=pytest.mark.slow),
    pytest.param({"node": 1, "told to end": 1}, 2, 2, marks=pytest.mark.slow),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("budget", "num_groups", "num_requests"), INNOCENT)
def test_however_often_what_no_request_can_cause_happens_nobody_is_taken_for_poison(
    budget: dict[str, int], num_groups: int, num_requests: int
) -> None:
    def make() -> World:
        return World(
            num_groups=num_groups,
            num_requests=num_requests,
            budget=budget,
            max_restarts=sum(budget.values()),
            poison_after=2,
        )

    _, kinds = explore(make)
    assert set(budget) <= kinds


POISON = [
    ({"hand over": 1}, 1, 1),
    ({"hand over": 1}, 1, 2),
    pytest.param({"node": 1}, 1, 2, marks=pytest.mark.slow),
    pytest.param({"hand over": 1, "cut": 1}, 1, 1, marks=pytest.mark.slow),
    pytest.param({"hand over": 1}, 2, 2, marks=pytest.mark.slow),
    pytest.param({"fewer": 1}, 2, 1, marks=pytest.mark.slow),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("budget", "num_groups", "num_requests"), POISON)
def test_poison_ends_by_its_second_death_whatever_happens_between_and_nobody_else_does(
    budget: dict[str, int], num_groups: int, num_requests: int
) -> None:
    """One more death for each other request that was computed with it."""

    def make() -> World:
        return World(
            num_groups=num_groups,
            num_requests=num_requests,
            budget=budget,
            max_restarts=sum(budget.values()) + num_requests + 2,
            poison_after=2,
            has_poison=True,
        )

    _, kinds = explore(make)
    assert set(budget) <= kinds


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("budget", "num_groups", "num_requests"),
    [
        ({"fewer": 1, "more": 1}, 2, 1),
        ({"die": 1, "cut": 1, "answer and die": 1, "hang": 1}, 1, 1),
        ({"die": 1, "abort": 1, "hand over": 1, "stop": 1}, 1, 2),
        ({"die": 2}, 2, 2),
        ({"die": 1, "fewer": 1, "more": 1}, 2, 1),
    ],
)
def test_no_order_of_events_in_larger_worlds_does(
    budget: dict[str, int], num_groups: int, num_requests: int
) -> None:
    check_all(budget, num_groups=num_groups, num_requests=num_requests)
