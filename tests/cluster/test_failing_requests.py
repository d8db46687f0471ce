"""A request that makes the engine core raise an error ends with it, and nobody else does."""

from collections.abc import Callable

import pytest

from cluster.wire import TO_CLIENT
from scheduler import stopping
from scheduler.admission import AdmissionRules
from scheduler.errors import RequestFailed
from scheduler.group import Group
from scheduler.request import Finish, Request, TokenBatch
from scheduler.sequences import Sequence
from tests.cluster.explored import Asked, World
from tests.cluster.test_exploration import duty

BAD = 0
"""Handle of the request that cannot be handled."""


def make_world() -> World:
    return World(num_groups=1, num_requests=2, budget={})


def failing_for_bad(
    function: Callable[..., object], request_of: Callable[..., Request]
) -> Callable[..., object]:
    def replaced(*args: object, **fields: object) -> object:
        if request_of(*args).handle == BAD:
            raise KeyError("a state that should not be")
        return function(*args, **fields)

    return replaced


def compute_for_ever(world: World) -> None:
    while True:
        world.turn()
        world.do(("answer", 0))


def of_sequence(_: object, sequence: Sequence, *__: object) -> Request:
    return sequence.request


@pytest.mark.parametrize(
    ("owner", "name", "request_of"),
    [
        (AdmissionRules, "check", lambda _, request: request),
        (Group, "match", of_sequence),
        (Group, "computes_soon", of_sequence),
        (AdmissionRules, "has_room", lambda _, group, sequence, *__: sequence.request),
    ],
)
def test_it_ends_alone_where_nothing_has_changed_yet(
    owner: type, name: str, request_of: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, failing_for_bad(getattr(owner, name), request_of))
    world = make_world()
    while not world.is_settled():
        event = duty(world)
        assert event is not None
        world.do(event)

    bad, good = world.requests
    assert (bad.end, good.end) == ("error", "length")
    assert "KeyError: 'a state that should not be'" in world.messages[BAD]


@pytest.mark.parametrize(
    ("owner", "name", "request_of"),
    [
        (Group, "admit", lambda _, draft, sequence, *__: sequence.request),
        (stopping, "finish_of_token", lambda sequence, *_: sequence.request),
    ],
)
def test_it_alone_ends_with_an_engine_that_cannot_go_on(
    owner: type, name: str, request_of: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others go on with the next engine, as after any other end of one."""
    monkeypatch.setattr(owner, name, failing_for_bad(getattr(owner, name), request_of))
    world = World(num_groups=1, num_requests=0, budget={})
    world.requests = [Asked([5, 6, 7], BAD), Asked([8, 9, 10], BAD + 1)]
    for asked in world.requests:
        world.submit(asked)
    with pytest.raises(RequestFailed):
        compute_for_ever(world)

    told = [TO_CLIENT.decode(frame) for _, frame in world.links.front.sent]
    (last,) = [batch for batch in told if isinstance(batch, TokenBatch) and len(batch.finish)]
    assert (last.handle.tolist(), last.finish.tolist()) == ([BAD], [Finish.ERROR])
    assert "KeyError" in last.ended[0].message
