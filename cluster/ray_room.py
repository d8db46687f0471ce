"""Room for the ranks of one worker group on a Ray cluster, and words for when there is none.

A placement group each. A stage's ranks are together in one bundle, and so on one node, as long
as some node can hold so many; else each rank has a bundle of its own. Ray packs the bundles
onto as few nodes as it can.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.util import placement_group_table
from ray.util.placement_group import placement_group, remove_placement_group

from cluster.errors import BackendError
from cluster.logs import EventLog
from cluster.start_watch import SAY_EVERY_S

LOOK_S = 2.0
"""After this long without room, and again and again, see what there is."""


NODE_ID = "ray.io/node-id"
"""A label that Ray gives each node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRoom:
    """One node as Ray knows it."""

    node: str
    host: str
    name: str
    """Of the host"""
    total: Mapping[str, float]
    free: Mapping[str, float]


def list_nodes(avoided: Collection[str] = ()) -> list[NodeRoom]:
    """The living nodes but the avoided ones, with what each has of every resource."""
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()  # type: ignore[no-untyped-call]
    return [
        NodeRoom(
            node=node["NodeID"],
            host=node["NodeManagerAddress"],
            name=node["NodeManagerHostname"],
            total=node["Resources"],
            free=free.get(node["NodeID"], {}),
        )
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
        and not {node["NodeManagerAddress"], node["NodeManagerHostname"]} & set(avoided)
    ]


class Room:
    """Bundles for the ranks of one group, asked for at once and perhaps not there yet."""

    def __init__(
        self,
        num_stages: int,
        ranks_per_stage: int,
        *,
        uses_gpus: bool,
        avoided: Collection[str] = (),
    ) -> None:
        """
        Args:
            avoided: nodes that must not be used, by address or host name.
        """
        self.avoided = avoided
        self.per_rank = {"CPU": 1.0, "GPU": 1.0} if uses_gpus else {"CPU": 1.0}
        self.num_ranks = num_stages * ranks_per_stage
        fits = any(_has(node.total, self.per_rank, ranks_per_stage) for node in list_nodes(avoided))
        self._ranks_per_bundle = ranks_per_stage if fits else 1
        bundle = {kind: amount * self._ranks_per_bundle for kind, amount in self.per_rank.items()}
        num_bundles = self.num_ranks // self._ranks_per_bundle
        self.group = placement_group(
            [bundle] * num_bundles,
            strategy="PACK",
            bundle_label_selector=[self._elsewhere()] * num_bundles if avoided else None,
        )

    def _elsewhere(self) -> dict[str, str]:
        """What Ray says of the nodes that are not avoided."""
        usable = {node.node for node in list_nodes(self.avoided)}
        rest = [node.node for node in list_nodes() if node.node not in usable]
        return {NODE_ID: f"!in({','.join(rest)})"} if rest else {}

    def bundle_of(self, rank: int) -> int:
        return rank // self._ranks_per_bundle

    def is_there(self, timeout_s: float) -> bool:
        return bool(self.group.wait(max(0.0, timeout_s)))

    def nodes(self) -> list[str]:
        """Ray's id of each rank's node; call it when the room is there."""
        node_of = placement_group_table(self.group)["bundles_to_node_id"]
        return [str(node_of[self.bundle_of(rank)]) for rank in range(self.num_ranks)]

    def give_back(self) -> None:
        """End what runs in it, too."""
        with contextlib.suppress(Exception):  # Ray is gone already
            remove_placement_group(self.group)


def wait_for_rooms(
    rooms: Sequence[Room],
    deadline: float,
    patience_s: float,
    is_over: Callable[[], bool],
    log: EventLog,
) -> None:
    """Return when every room is there; say now and then what it waits for.

    Args:
        patience_s: for nodes that may still come, if those that are there could never do.
        is_over: nobody wants the rooms any longer.

    Raises:
        BackendError: with what was asked, what is free, and what each node has.
    """
    began = next_line = time.monotonic()
    while True:
        if all(room.is_there(min(LOOK_S, deadline - time.monotonic())) for room in rooms):
            return
        now = time.monotonic()
        is_hopeless = now >= began + patience_s and not _could_ever_fit(rooms)
        if is_hopeless or now >= deadline or is_over():
            raise BackendError(no_room(rooms, list_nodes(rooms[0].avoided)))
        if now >= next_line:
            next_line = now + SAY_EVERY_S
            log.info("waiting_for_room", until=no_room(rooms, list_nodes(rooms[0].avoided)))


def no_room(rooms: Sequence[Room], nodes: Sequence[NodeRoom]) -> str:
    """What was asked, what is free, and what each node has."""
    per_rank = rooms[0].per_rank
    num_ranks = sum(room.num_ranks for room in rooms)
    asked = ", ".join(f"{amount * num_ranks:g} {kind}" for kind, amount in per_rank.items())
    there = ", ".join(
        f"{_sum(nodes, kind, 'free'):g} of {_sum(nodes, kind, 'total'):g} {kind} free"
        for kind in per_rank
    )
    groups = f" in {len(rooms)} groups" if len(rooms) > 1 else ""
    lines = [
        f"no room: asked for {asked} ({num_ranks} ranks{groups}), there are {there}. Lower "
        "tensor_parallel_size, pipeline_parallel_size or num_groups, add nodes, or use "
        "backend=local, which lets ranks share cores. Nodes:"
    ]
    for node in nodes:
        has = ", ".join(
            f"{node.free.get(kind, 0):g} of {node.total.get(kind, 0):g} {kind} free"
            for kind in per_rank
        )
        lines.append(f"  {node.host} {node.node[:8]}: {has}")
    if avoided := rooms[0].avoided:
        lines.append(f"  Drained, and not counted: {', '.join(sorted(avoided))}")
    return "\n".join(lines)


def _could_ever_fit(rooms: Sequence[Room]) -> bool:
    """Whether the nodes have enough in all, be it in use now."""
    nodes = list_nodes(rooms[0].avoided)
    num_ranks = sum(room.num_ranks for room in rooms)
    return all(
        _sum(nodes, kind, "total") >= amount * num_ranks
        for kind, amount in rooms[0].per_rank.items()
    )


def _has(resources: Mapping[str, float], per_rank: Mapping[str, float], num_ranks: int) -> bool:
    return all(resources.get(kind, 0.0) >= amount * num_ranks for kind, amount in per_rank.items())


def _sum(nodes: Sequence[NodeRoom], kind: str, which: str) -> float:
    return sum((node.free if which == "free" else node.total).get(kind, 0.0) for node in nodes)
