"""Who is connected to the back socket, and what they may say.

Workers and the supervisor show the engine's key once, in their hello; whoever does not is a
stranger, and what strangers send is dropped and counted. What is let through becomes an event
for the engine, which decides what it means.
"""

import hmac
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from cluster.errors import PeerGone, WireError
from cluster.front_desk import is_worth_a_line
from cluster.links.server import ServerLink
from cluster.logs import EventLog
from cluster.messages.clients import Refusal
from cluster.messages.sockets import FromEngine, ToEngine
from cluster.messages.supervisor import (
    GroupStopped,
    HandOver,
    Ping,
    Pong,
    RenewGroups,
    Shutdown,
    StartPhases,
    SupervisorHello,
    UpgradeNews,
)
from cluster.messages.workers import (
    Introduction,
    RankPhase,
    Stop,
    WorkerFailed,
    WorkerGreeting,
    WorkerHello,
    WorkerLease,
    WorkerReady,
)
from cluster.wire import FROM_ENGINE, PROTOCOL_VERSION, TO_ENGINE
from scheduler.plan import StepResult


@dataclass(frozen=True, slots=True)
class WorkerGreeted:
    """A worker with our key is there and has loaded nothing yet."""

    peer: bytes
    greeting: WorkerGreeting


@dataclass(frozen=True, slots=True)
class WorkerCame:
    """A worker with our key has loaded its weights."""

    peer: bytes
    hello: WorkerHello


@dataclass(frozen=True, slots=True)
class WorkerAllocated:
    """A worker of this group is ready."""

    peer: bytes
    group: int


@dataclass(frozen=True, slots=True)
class WorkerAnswered:
    """A worker of this group has computed a step."""

    peer: bytes
    group: int
    result: StepResult


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """The connection of a worker of this group ended; all that it said came before."""

    peer: bytes
    group: int


@dataclass(frozen=True, slots=True)
class SupervisorLeft:
    """Nobody starts and ends processes for us any more."""


GroupEvent: TypeAlias = (
    WorkerGreeted
    | RankPhase
    | WorkerCame
    | WorkerAllocated
    | WorkerLeft
    | WorkerFailed
    | GroupStopped
    | RenewGroups
)
"""What happens to worker groups, beside their answers."""

BackEvent: TypeAlias = (
    GroupEvent | WorkerAnswered | StartPhases | Shutdown | UpgradeNews | HandOver | SupervisorLeft
)

FromSupervisor = (
    WorkerFailed | GroupStopped | StartPhases | Shutdown | UpgradeNews | HandOver | RenewGroups
)
"""What the engine has to decide about of what the supervisor says."""


class BackDesk:
    """The back socket's side of the engine."""

    def __init__(self, link: ServerLink, engine_id: str, key: str, log: EventLog) -> None:
        self._link = link
        self._engine_id = engine_id
        self._key = key.encode()
        self._log = log
        self._group_by_peer: dict[bytes, int] = {}
        self._dismissed: set[bytes] = set()
        """Workers of lost groups, which may still answer for a moment."""
        self._leases: dict[bytes, WorkerLease] = {}
        """Second connections of workers, by which they hear while they compute."""
        self._supervisor: bytes | None = None
        self._untold: list[FromEngine] = []
        """For the supervisor, who may come after the workers of a small model are ready."""
        self.num_dropped = 0

    def receive(self) -> Iterator[BackEvent]:
        """What has happened, without waiting."""
        for peer, frame in self._link.receive():
            if frame is None:
                yield from self._left(peer)
                continue
            try:
                message = TO_ENGINE.decode(frame)
            except WireError as error:
                self.drop(str(error))
                continue
            event = self._event(peer, message)
            if event is not None:
                yield event

    def _event(self, peer: bytes, message: ToEngine) -> BackEvent | None:
        group = self._group_by_peer.get(peer)
        if group is not None:
            return self._from_worker(peer, group, message)
        if peer == self._supervisor:
            if isinstance(message, FromSupervisor):
                return message
            if isinstance(message, Ping):
                self.send(peer, Pong())
                return None
            self.drop(f"the supervisor sent a {type(message).__name__}")
            return None
        if peer not in self._dismissed:
            return self._from_stranger(peer, message)
        return None

    def _from_worker(self, peer: bytes, group: int, message: ToEngine) -> BackEvent | None:
        match message:
            case StepResult():
                return WorkerAnswered(peer, group, message)
            case WorkerReady():
                return WorkerAllocated(peer, group)
            case WorkerHello() if self._is_ours(message):
                return WorkerCame(peer, message)
            case RankPhase() if message.group == group:
                return message
            case WorkerFailed():
                return message
        self.drop(f"a worker of group {group} sent a {type(message).__name__}")
        return None

    def _from_stranger(self, peer: bytes, message: ToEngine) -> BackEvent | None:
        """Only somebody with our key is no stranger any more."""
        if isinstance(message, WorkerFailed) and self._is_our_key(message.key):
            return message
        if not isinstance(message, Introduction | SupervisorHello):
            self.drop(f"a stranger sent a {type(message).__name__}")
            return None
        if message.protocol != PROTOCOL_VERSION:
            self.refuse(
                peer,
                "protocol",
                f"the engine speaks protocol {PROTOCOL_VERSION}, this peer {message.protocol}; "
                "install the same version of Stoker on every node",
            )
            return None
        if not self._is_ours(message):
            self.refuse(peer, "stranger", "this is another engine than the one you look for")
            return None
        if isinstance(message, SupervisorHello):
            if self._supervisor is not None:
                self.refuse(peer, "stranger", "the engine has a supervisor already")
                return None
            self._supervisor = peer
            untold, self._untold = self._untold, []
            for news in untold:
                self.send(peer, news)
            return None
        if isinstance(message, WorkerLease):
            self._leases[peer] = message
            return None
        self._group_by_peer[peer] = message.group
        if isinstance(message, WorkerGreeting):
            return WorkerGreeted(peer, message)
        return WorkerCame(peer, message)

    def _is_ours(self, message: Introduction | SupervisorHello) -> bool:
        return message.engine_id == self._engine_id and self._is_our_key(message.key)

    def _is_our_key(self, key: str) -> bool:
        return hmac.compare_digest(key.encode(), self._key)

    def _left(self, peer: bytes) -> Iterator[BackEvent]:
        self._dismissed.discard(peer)
        self._leases.pop(peer, None)
        if peer == self._supervisor:
            self._supervisor = None
            yield SupervisorLeft()
        group = self._group_by_peer.pop(peer, None)
        if group is not None:
            yield WorkerLeft(peer, group)

    # --- sending ---

    def send(self, peer: bytes, message: FromEngine) -> None:
        """Queue a message for a peer that may be gone, which is noticed as its leaving."""
        try:
            self._link.send(peer, FROM_ENGINE.encode(message))
        except PeerGone as error:
            self._log.debug("back_message_lost", error=error)

    def tell_supervisor(self, message: FromEngine) -> None:
        """Now, or when it has said hello."""
        if self._supervisor is None:
            self._untold.append(message)
        else:
            self.send(self._supervisor, message)

    def dismiss(self, group: int, message: str) -> None:
        """Tell the workers of a lost group to end, and hear no more of them."""
        for peer in [peer for peer, its_group in self._group_by_peer.items() if its_group == group]:
            del self._group_by_peer[peer]
            self._dismissed.add(peer)
            self.send(peer, Stop(message))
        for peer, lease in list(self._leases.items()):
            if lease.group == group:
                del self._leases[peer]
                self._dismissed.add(peer)
                self.send(peer, Stop(message))

    def stop_all(self, message: str) -> None:
        """Tell every worker to end in order."""
        for peer in self._group_by_peer:
            self.send(peer, Stop(message))

    def refuse(self, peer: bytes, reason: str, message: str) -> None:
        """Send away somebody who is not, or no longer, one of ours."""
        self._group_by_peer.pop(peer, None)
        self.drop(message)
        self.send(peer, Refusal(reason=reason, message=message))

    def drop(self, why: str) -> None:
        """Count something that should not have come."""
        self.num_dropped += 1
        if is_worth_a_line(self.num_dropped):
            self._log.warning("back_message_dropped", total=self.num_dropped, error=why)
