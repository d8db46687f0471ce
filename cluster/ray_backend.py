"""Worker processes as Ray actors: placed, started and watched by Ray, which is in no step's path.

One placement group per worker group (`cluster.ray_room`), one actor per rank
(`cluster.ray_rank`), which hosts the same `WorkerHost` as a plain process. Without an address a
Ray of our own is started on this host, with every socket on loopback, its own token, and its
files in a folder that `close` removes. Every wait on Ray has a limit and says what it waits for.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from cluster.backend import Place, Report, WorkerLaunch
from cluster.cores import deal_cores
from cluster.logs import EventLog
from cluster.ray_connection import RayConnection
from cluster.ray_group import CLOSE_WAIT_S, RankGroup
from cluster.ray_keepers import RayKeepers

if TYPE_CHECKING:  # Ray reads its settings from the environment when it is imported
    from cluster.ray_rank import RankSite
    from cluster.ray_room import NodeRoom, Room

LATER_ROOM_S = 30.0
"""For the room of one group while others serve, at least: what others hold they will not give back,
and no other group is started or ended meanwhile."""


class RayBackend:
    """Actors of this driver. `num_ranks` ranks of all groups share the nodes."""

    def __init__(
        self,
        report: Report,
        *,
        num_ranks: int,
        cores: Sequence[int],
        log: EventLog,
        address: str = "",
        uses_gpus: bool = False,
        environment: Mapping[str, str] | None = None,
        patience_s: float = 0.0,
        weights_key: str = "",
    ) -> None:
        """Nothing is started yet.

        Args:
            cores: of this host; a Ray of our own has as many CPUs.
            address: of the Ray to connect to; empty: one of our own.
            environment: variables for workers on nodes that do not set them.
            patience_s: how long nodes with missing room may take to join.
            weights_key: what ranks show to get weights that are kept for them; empty: none are.
        """
        self._report = report
        self._num_ranks = num_ranks
        self._log = log
        self._ray = RayConnection(address, len(cores))
        self._uses_gpus = uses_gpus
        self._environment = dict(environment or {})
        self._patience_s = patience_s
        self._keepers = RayKeepers(weights_key, log) if weights_key else None
        self._groups: dict[tuple[int, int], RankGroup] = {}
        self._spare: dict[int, Room] = {}
        """Room taken at the first `place` for the groups that are placed next."""
        self._has_reserved = False
        self._is_over = threading.Event()
        self._avoided: frozenset[str] = frozenset()

    def open(self, timeout_s: float) -> str:
        """Connect to the Ray at `address`, or start one here."""
        started = time.monotonic()
        host = self._ray.open(timeout_s)
        own = not self._ray.address
        self._log.info("ray_ready", seconds=time.monotonic() - started, own=own, host=host)
        return "" if own else host

    def nodes(self) -> "list[NodeRoom]":
        """The nodes that are there, with what each has."""
        from cluster.ray_room import list_nodes

        return list_nodes()

    def avoid(self, nodes: Collection[str]) -> None:
        self._avoided = frozenset(nodes)

    def forget_code(self) -> None:
        """Each actor loads its own."""

    def place(
        self, group: int, epoch: int, num_stages: int, ranks_per_stage: int, timeout_s: float
    ) -> tuple[Place, ...]:
        deadline = time.monotonic() + timeout_s
        if not self._has_reserved:
            self._has_reserved = True
            num_groups = max(1, self._num_ranks // (num_stages * ranks_per_stage))
            for number in range(group, group + num_groups):
                self._spare[number] = self._room(num_stages, ranks_per_stage)
            self._wait_for(list(self._spare.values()), deadline)
        room = self._spare.pop(group, None)
        if room is None:
            room = self._room(num_stages, ranks_per_stage)
            wait_s = max(self._patience_s, LATER_ROOM_S)
            self._wait_for([room], min(deadline, time.monotonic() + wait_s))
        placed = self._groups[group, epoch] = RankGroup(group, epoch, room, self._report)
        try:
            if self._keepers is not None:
                self._keepers.start(room.nodes())
            sites = placed.start_actors(self._environment, deadline)
        except BaseException:
            self.stop(group, epoch, 0.0)
            raise
        ranks_on, cores = self._shares(group, sites)
        keepers = {}
        if self._keepers is not None:
            keepers = self._keepers.names(site.node for site in sites)
        return tuple(
            Place(
                rank=rank,
                node=site.node,
                host=site.host,
                cores=cores[rank],
                ranks_on_host=ranks_on[rank],
                keeper=keepers.get(site.node, ""),
            )
            for rank, site in enumerate(sites)
        )

    def _room(self, num_stages: int, ranks_per_stage: int) -> "Room":
        from cluster.ray_room import Room

        return Room(num_stages, ranks_per_stage, uses_gpus=self._uses_gpus, avoided=self._avoided)

    def _wait_for(self, rooms: Sequence["Room"], deadline: float) -> None:
        from cluster.ray_room import wait_for_rooms

        try:
            wait_for_rooms(rooms, deadline, self._patience_s, self._is_over.is_set, self._log)
        except BaseException:
            self._spare.clear()
            for room in rooms:
                room.give_back()
            raise

    def _shares(
        self, group: int, sites: Sequence["RankSite"]
    ) -> tuple[list[int], list[tuple[int, ...]]]:
        """For each rank of a group: how many ranks of all groups are on its node, and its share
        of the node's cores among them."""
        rooms = {number: placed.room for (number, _), placed in self._groups.items()} | self._spare
        ranks_on: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for number in sorted(rooms):
            for rank, node in enumerate(rooms[number].nodes()):
                ranks_on[node].append((number, rank))
        cores = []
        for rank, site in enumerate(sites):
            there = ranks_on[site.node]
            cores.append(deal_cores(site.cores, len(there))[there.index((group, rank))])
        return [len(ranks_on[site.node]) for site in sites], cores

    def start(self, launches: Sequence[WorkerLaunch], timeout_s: float) -> None:
        self._groups[launches[0].group, launches[0].epoch].run(launches, timeout_s)

    def stop(self, group: int, epoch: int, timeout_s: float) -> None:
        placed = self._groups.pop((group, epoch), None)
        if placed is not None:
            placed.end(timeout_s)

    def give_up(self) -> None:
        self._is_over.set()

    def close(self, timeout_s: float) -> None:
        for group, epoch in list(self._groups):
            self.stop(group, epoch, min(timeout_s, CLOSE_WAIT_S))
        while self._spare:
            self._spare.popitem()[1].give_back()
        if self._keepers is not None:
            self._keepers.close()
        self._ray.close()
