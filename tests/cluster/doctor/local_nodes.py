"""Nodes for a survey that are loopback addresses of this machine, each with a real probe."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import msgspec
from msgspec.structs import replace

from cluster.doctor.probe import METHODS, Meeting, NodeProbe, Reached
from cluster.doctor.scene import Host, Pair, Room


class LocalNodes:
    """Answers each call in a thread. A test spoils what a node answers, or lets it hang."""

    def __init__(self, *addresses: str) -> None:
        self._addresses = addresses
        self._probes = {address: NodeProbe() for address in addresses}
        self._pool = ThreadPoolExecutor(16)
        self.hung: set[str] = set()
        self.ahead_s: dict[str, float] = {}
        """By node, how far its clock is ahead."""
        self.closed_ports: dict[str, int] = {}
        """By node, a port that it says it listens at."""
        self.bytes_per_s: dict[frozenset[str], float] = {}
        self.unmet: set[frozenset[str]] = set()
        self.asked: list[tuple[str, str]] = []

    def rooms(self) -> tuple[Room, ...]:
        return tuple(Room(node=a, address=a, cpus=2, free_cpus=2) for a in self._addresses)

    def ask(self, calls: Sequence[tuple[str, str, bytes]], timeout_s: float) -> list[bytes | str]:
        futures = [self._submit(*call) for call in calls]
        wait([future for future in futures if future is not None], timeout_s)
        return [
            future.result()
            if future is not None and future.done()
            else f"no answer within {timeout_s:.1f} s"
            for future in futures
        ]

    def _submit(self, node: str, method: str, argument: bytes) -> "Future[bytes] | None":
        assert method in METHODS
        self.asked.append((node, method))
        if node in self.hung:
            return None
        return self._pool.submit(self._answer, node, method, argument)

    def _answer(self, node: str, method: str, argument: bytes) -> bytes:
        if method == "listen" and node in self.closed_ports:
            return str(self.closed_ports[node]).encode()
        if method == "meet":  # two ranks of one process cannot meet, so this is scripted
            return self._meet(msgspec.json.decode(argument, type=Meeting))
        answer: bytes = getattr(self._probes[node], method)(argument)
        if method == "facts":
            host = msgspec.json.decode(answer, type=Host)
            found = replace(host, name_resolves_to=(node,), address_outward=node)
            lo = replace(host.interfaces[0], name="fake", addresses=self._addresses)
            return msgspec.json.encode(replace(found, interfaces=(lo,)))
        if method == "reach":
            ways = msgspec.json.decode(answer, type=list[Reached])
            return msgspec.json.encode([self._with_clock(node, way) for way in ways])
        return answer

    def _with_clock(self, source: str, way: Reached) -> Reached:
        ahead = self.ahead_s.get(way.path.target, 0.0) - self.ahead_s.get(source, 0.0)
        return replace(way, clock_ahead_s=way.clock_ahead_s + ahead)

    def _meet(self, meeting: Meeting) -> bytes:
        pair = frozenset(meeting.nodes)
        problem = "MeetingFailed: nobody came" if pair in self.unmet else ""
        return msgspec.json.encode(
            Pair(
                nodes=meeting.nodes,
                problem=problem,
                latency_s=0.001,
                bytes_per_s=self.bytes_per_s.get(pair, 1e9),
            )
        )

    def close(self) -> None:
        for probe in self._probes.values():
            probe.close(b"")
        self._pool.shutdown(wait=True)
