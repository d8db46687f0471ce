"""Examines the nodes of a cluster: who is asked what, in which order, and until when.

How nodes are asked is somebody else's (`Nodes`): Ray's, or a test's. What is learnt is told as it
grows, so that whoever ends this before its time knows what was known.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from cluster.doctor.collect import Question
from cluster.doctor.probe import Echo, Errand, Meeting, Reached, Target
from cluster.doctor.scene import Host, Pair, Path, Room

FACTS_S = 6.0
"""For a node to start a process and tell its facts."""
REACH_S = 2.0
"""For a connection between two nodes."""
MEET_S = 4.0
"""For two ranks to meet and sum; the first to come still load their libraries."""
CALL_S = 1.5
"""For a call that has nothing to do, on top of what it does."""

BACK_SOCKET = "the back socket"

Known = TypeVar("Known")


class Nodes(Protocol):
    """Nodes that can be asked to do what `cluster.doctor.probe.NodeProbe` does."""

    def rooms(self) -> tuple[Room, ...]:
        """All nodes, the leader's first."""
        ...

    def ask(self, calls: Sequence[tuple[str, str, bytes]], timeout_s: float) -> list[bytes | str]:
        """For each (node, method, argument) the answer, or in words why there is none."""
        ...


class Survey(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known by now."""

    rooms: tuple[Room, ...] = ()
    hosts: tuple[Host, ...] = ()
    silent: dict[str, str] = {}
    paths: tuple[Path, ...] = ()
    pairs: tuple[Pair, ...] = ()
    num_pairs_left: int = 0
    """Pairs of nodes that were not measured, for want of time."""
    is_complete: bool = False


def survey(
    nodes: Nodes,
    question: Question,
    *,
    back_address: str = "",
    deadline: float,
    tell: Callable[[Survey], None],
    now: Callable[[], float] = time.monotonic,
) -> Survey:
    """Examine all nodes that are alive, until `deadline` at the latest.

    Args:
        question: what each node is asked about; its `node` and `address` are filled in here.
        back_address: where the engine will listen on this host; tried from every node.
    """
    known = Survey(rooms=nodes.rooms())
    tell(known)
    known = _ask_facts(nodes, question, known, _least(FACTS_S, deadline, now))
    tell(known)
    addresses = {host.node: host.address for host in known.hosts}
    if len(addresses) > 1 and now() < deadline:
        known = _try_ways(nodes, addresses, back_address, known)
        tell(known)
    rounds = rounds_of([host.node for host in known.hosts])
    for number, pairs in enumerate(rounds):
        if now() + MEET_S > deadline:
            left = sum(len(later) for later in rounds[number:])
            known = replace(known, num_pairs_left=left)
            break
        known = replace(known, pairs=known.pairs + _meet(nodes, pairs, addresses))
        tell(known)
    return known


def rounds_of(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """All pairs, in rounds in which nobody is in two: one that sits out, the others in a ring."""
    ring: list[str | None] = list(names)
    if len(ring) % 2:
        ring.append(None)
    rounds = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        faced = zip(ring[:half], reversed(ring[half:]), strict=True)
        rounds.append([(a, b) for a, b in faced if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return [pairs for pairs in rounds if pairs]


def _least(limit_s: float, deadline: float, now: Callable[[], float]) -> float:
    return max(0.1, min(limit_s, deadline - now()))


def _ask_facts(nodes: Nodes, question: Question, known: Survey, limit_s: float) -> Survey:
    alive = [room for room in known.rooms if room.is_alive]
    calls = []
    for number, room in enumerate(alive):
        outward = alive[0].address if number else "".join(r.address for r in alive[1:2])
        asked = replace(question, node=room.node, address=room.address, outward=outward)
        calls.append((room.node, "facts", msgspec.json.encode(asked)))
    hosts, silent = [], {}
    for room, answer in zip(alive, nodes.ask(calls, limit_s), strict=True):
        if isinstance(answer, str):
            silent[room.node] = f"asked for its facts: {answer}"
        else:
            hosts.append(msgspec.json.decode(answer, type=Host))
    return replace(known, hosts=tuple(hosts), silent=silent)


def _try_ways(nodes: Nodes, addresses: dict[str, str], back_address: str, known: Survey) -> Survey:
    """From each node to a port of each other one, and to the engine's back socket."""
    names = list(addresses)
    calls = [(name, "listen", addresses[name].encode()) for name in names]
    targets, problems = [], []
    for name, answer in zip(names, nodes.ask(calls, CALL_S), strict=True):
        if isinstance(answer, str):
            problems.append(Path(source=name, target=name, address=addresses[name], problem=answer))
        else:
            targets.append(Target(node=name, host=addresses[name], port=int(answer)))
    back = _open_back(back_address)
    if back is not None:
        host, _, port = back_address.removeprefix("tcp://").rpartition(":")
        target = Target(node=names[0], host=host.strip("[]"), port=int(port))
        targets.append(target)
    errands = [
        (
            name,
            "reach",
            msgspec.json.encode(
                Errand(
                    node=name,
                    targets=tuple(t for t in targets if t.node != name),
                    timeout_s=REACH_S,
                )
            ),
        )
        for name in names
    ]
    ways: list[Reached] = []
    for name, answer in zip(names, nodes.ask(errands, REACH_S + CALL_S), strict=True):
        if isinstance(answer, str):
            problems.append(Path(source=name, target=name, address="", problem=answer))
        else:
            ways.extend(msgspec.json.decode(answer, type=list[Reached]))
    if back is not None:
        back.close()
    return replace(
        known,
        paths=(*problems, *(way.path for way in ways)),
        hosts=tuple(_with_clock(host, names[0], ways) for host in known.hosts),
    )


def _open_back(address: str) -> Echo | None:
    """Stand in for the engine's back socket, if it has a port of its own and it is free."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not int(port):
        return None
    try:
        return Echo(host.strip("[]"), int(port))
    except OSError:  # which is a finding about the host itself
        return None


def _with_clock(host: Host, leader: str, ways: Sequence[Reached]) -> Host:
    """The host with its clock beside the leader's, by the leader's best round trip to it."""
    seen = [
        w for w in ways if (w.path.source, w.path.target) == (leader, host.node) and w.path.rtt_s
    ]
    if not seen:
        return host
    best = min(seen, key=lambda way: way.path.rtt_s)
    return replace(host, clock_ahead_s=best.clock_ahead_s, clock_error_s=best.clock_error_s)


def _meet(
    nodes: Nodes, pairs: Sequence[tuple[str, str]], addresses: dict[str, str]
) -> tuple[Pair, ...]:
    """Let pairs of which nobody is in two meet at once."""
    opened = nodes.ask([(a, "open_meeting", addresses[a].encode()) for a, _ in pairs], CALL_S)
    found, calls, met = [], [], []
    for (a, b), port in zip(pairs, opened, strict=True):
        if isinstance(port, str):
            found.append(Pair(nodes=(a, b), problem=f"{a} opened no port: {port}"))
            continue
        met.append((a, b))
        for rank, name in enumerate((a, b)):
            meeting = Meeting(
                nodes=(a, b), rank=rank, host=addresses[a], port=int(port), timeout_s=MEET_S
            )
            calls.append((name, "meet", msgspec.json.encode(meeting)))
    answers = nodes.ask(calls, MEET_S + CALL_S)
    for number, pair in enumerate(met):
        found.append(_worse(pair, answers[2 * number : 2 * number + 2]))
    return tuple(found)


def _worse(pair: tuple[str, str], answers: Sequence[bytes | str]) -> Pair:
    """Of what the two ranks say: a problem if one has one, else the slower figures."""
    told = [
        Pair(nodes=pair, problem=f"{name}: {answer}")
        if isinstance(answer, str)
        else msgspec.json.decode(answer, type=Pair)
        for name, answer in zip(pair, answers, strict=True)
    ]
    for one in told:
        if one.problem:
            return one
    return Pair(
        nodes=pair,
        latency_s=max(one.latency_s for one in told),
        bytes_per_s=min(one.bytes_per_s for one in told),
    )
