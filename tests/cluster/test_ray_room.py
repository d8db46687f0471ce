"""Who shares a node, and what is said when there is no room; without a Ray."""

import time
from dataclasses import dataclass, field

import pytest

from cluster import ray_room
from cluster.errors import BackendError
from cluster.logs import EventLog
from cluster.ray_backend import RayBackend
from cluster.ray_rank import RankSite
from cluster.ray_room import NodeRoom, no_room


@dataclass(frozen=True)
class TakenRoom:
    """A `Room` that is on the nodes that a test says."""

    where: list[str]
    per_rank: dict[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    avoided: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        return len(self.where)

    def nodes(self) -> list[str]:
        return self.where


@dataclass(frozen=True)
class ComingRoom(TakenRoom):
    """One that is never there."""

    waits_s: list[float] = field(default_factory=list)

    def is_there(self, timeout_s: float) -> bool:
        self.waits_s.append(timeout_s)
        assert len(self.waits_s) == 1, "it is waited for again"
        return False

    def give_back(self) -> None:
        """Nothing was taken."""


def site(node: str, num_cores: int) -> RankSite:
    return RankSite(node, f"10.0.0.{ord(node) - ord('a') + 1}", tuple(range(num_cores)))


def backend_with(rooms: dict[int, list[str]]) -> RayBackend:
    backend = RayBackend(lambda _: None, num_ranks=4, cores=(), log=EventLog("test"))
    backend._spare.update({group: TakenRoom(where) for group, where in rooms.items()})
    return backend


def test_the_ranks_of_all_groups_on_a_node_share_its_cores_and_no_others() -> None:
    backend = backend_with({0: ["a", "a"], 1: ["a", "b"]})

    counts, first = backend._shares(0, [site("a", 6), site("a", 6)])
    _, second = backend._shares(1, [site("a", 6), site("b", 4)])

    assert counts == [3, 3]
    assert [*first, *second] == [(0, 1), (2, 3), (4, 5), (0, 1, 2, 3)]


def test_a_group_alone_on_its_node_has_all_of_it() -> None:
    counts, cores = backend_with({0: ["a"], 1: ["b"]})._shares(1, [site("b", 3)])

    assert (counts, cores) == ([1], [(0, 1, 2)])


def test_a_wait_for_room_ends_when_nobody_wants_it_any_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_room, "list_nodes", lambda avoided=(): [])
    backend = backend_with({})
    backend._patience_s = 3600.0
    backend.give_up()

    with pytest.raises(BackendError, match="no room: asked for 2 CPU"):
        backend._wait_for([ComingRoom(["a", "a"])], time.monotonic() + 3600)


def test_case_105_where_there_is_no_room_asked_free_and_each_node_are_named() -> None:
    nodes = [
        NodeRoom(
            node="aaaaaaaaaa", host="10.0.0.1", name="a", total={"CPU": 4.0}, free={"CPU": 1.0}
        ),
        NodeRoom(node="bbbbbbbbbb", host="10.0.0.2", name="b", total={"CPU": 2.0}, free={}),
    ]

    rooms = [TakenRoom(["", ""], avoided=("c",)), TakenRoom(["", ""])]
    said = no_room(rooms, nodes).splitlines()

    assert said[0].startswith(
        "no room: asked for 4 CPU (4 ranks in 2 groups), there are 1 of 6 CPU free. Lower"
    )
    assert said[1:] == [
        "  10.0.0.1 aaaaaaaa: 1 of 4 CPU free",
        "  10.0.0.2 bbbbbbbb: 0 of 2 CPU free",
        "  Drained, and not counted: c",
    ]
