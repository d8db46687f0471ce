"""Every order in which an engine, its ranks and their processes may end, for one group of two.

The group's state machine and the supervisor's ledger are the real ones; the backend, the ranks and
the engine's process are played. The engine may end before the supervisor or the ranks have heard
what it decided last. From every state that can be reached there must be a way on, to service or to
a group that is given up; epochs never fall, and two never have processes side by side.
"""

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import pytest

from cluster.group_instructions import Instruction, LetLoad, Lose, Refuse, Serve, SizePool, Start
from cluster.group_ledger import GroupLedger
from cluster.groups import RestartPolicy, WorkerGroup
from cluster.messages.supervisor import GroupStopped
from cluster.messages.workers import WorkerFailed
from tests.cluster.test_groups import make_greeting, make_hello

RANKS = (0, 1)
TAKEOVER_S = 30.0
MOST_STATES = 60_000
MOST_DUTIES = 80

Event: TypeAlias = tuple[
    Literal["rank", "dies", "hangs", "backend", "engine ends", "engine", "tick"], int
]
"""What happens, and to which rank."""


@dataclass
class PlayedRank:
    """A process, and how far it is with the engine that it has greeted last."""

    engine: int = -1
    stage: Literal["new", "greeted", "may load", "loaded", "sized", "ready"] = "new"
    is_hung: bool = False
    """It waits for another rank, and does not come to the next engine."""


@dataclass
class World:
    most_engine_ends: int
    group: WorkerGroup | None = None
    """None: there is no engine."""
    engine: int = 0
    """Engines that there were"""
    epoch: int = 1
    """The highest one that was started"""
    ledger: GroupLedger = field(default_factory=GroupLedger)
    jobs: list[tuple[Literal["start", "stop"], int]] = field(default_factory=list)
    """Of the backend, one after the other"""
    ranks: dict[int, dict[int, PlayedRank]] = field(default_factory=dict)
    """By epoch and number; only those whose processes live"""
    num_engine_ends: int = 0
    num_deaths: int = 0
    now: float = 0.0
    unheard: bool = False
    """The engine ends before anybody hears what it says next."""

    def present(self) -> WorkerGroup:
        assert self.group is not None
        return self.group

    @property
    def key(self) -> str:
        """Equal for states from which the same can come. Deadlines come in their order anyway."""
        group = self.group
        machine = None
        if group is not None:
            machine = (
                group.epoch, group.state, sorted(group.ranks), sorted(group._greeted),
                [rank.is_ready for rank in group.ranks.values()], group._left is None,
                group._takeover_s, group._was_ever_ready, group._num_in_row,
                group._wake_at is None,
            )  # fmt: skip
        known = [(g.epoch, g.state, g.was_ready) for g in self.ledger.epochs()]
        ranks = [
            (epoch, number, rank.engine == self.engine, rank.stage, rank.is_hung)
            for epoch, each in sorted(self.ranks.items())
            for number, rank in sorted(each.items())
        ]
        return repr(
            (machine, known, len(self.ledger.news()), self.jobs, ranks, self.num_engine_ends,
             self.num_deaths, self.epoch)
        )  # fmt: skip

    # --- what may happen ---

    def faults(self) -> Iterator[Event]:
        if self.group is not None and self.num_engine_ends < self.most_engine_ends:
            yield "engine ends", 0
            yield "engine ends", 1  # with the next thing that it does, which nobody hears
        if self.num_deaths < 1:
            for number, rank in self.ranks.get(self.epoch, {}).items():
                yield "dies", number
                if rank.stage == "ready" and (self.group is None or rank.engine != self.engine):
                    yield "hangs", number

    def duties(self) -> Iterator[Event]:
        """What comes to pass by itself; time passes when nothing else does."""
        if self.group is None:
            yield "engine", 0
        if self.jobs:
            yield "backend", 0
        for number, rank in self.ranks.get(self.epoch, {}).items():
            if (
                self.group is not None
                and not rank.is_hung
                and (rank.engine != self.engine or rank.stage in ("new", "may load", "sized"))
            ):
                yield "rank", number

    def happen(self, event: Event) -> None:
        kind, number = event
        match kind:
            case "rank":
                self._move(number, self.ranks[self.epoch][number])
            case "dies":
                self.num_deaths += 1
                self._exit(self.epoch, number)
            case "hangs":
                self.num_deaths += 1
                self.ranks[self.epoch][number].is_hung = True
            case "backend":
                self._work()
            case "engine ends":
                self.num_engine_ends += 1
                if number:
                    self.unheard = True
                else:
                    self.group = None
            case "engine":
                self._begin_engine()
            case "tick":
                deadline = self.present().next_deadline
                assert deadline is not None
                self.now = max(self.now, deadline)
                self._follow(self.present().tick(self.now))

    def _move(self, number: int, rank: PlayedRank) -> None:
        group, epoch = self.present(), self.epoch
        if rank.engine != self.engine:
            rank.engine, rank.stage = self.engine, "new"
        peer = f"{epoch}.{number}.{self.engine}".encode()
        match rank.stage:
            case "new":
                rank.stage = "greeted"
                self._follow(group.greet(peer, make_greeting(number, epoch=epoch), "", self.now))
            case "may load":
                rank.stage = "loaded"
                self._follow(group.hello(peer, make_hello(number, epoch=epoch), self.now))
            case "sized":
                rank.stage = "ready"
                self._follow(group.ready(peer, self.now))

    def _exit(self, epoch: int, number: int) -> None:
        """A process ends unasked, which the supervisor sees."""
        del self.ranks[epoch][number]
        self._failed(epoch, number)

    def _failed(self, epoch: int, number: int) -> None:
        failure = WorkerFailed(group=0, epoch=epoch, rank=number, message="died")
        self.ledger.failed(failure)
        self._hear(failure)

    def _work(self) -> None:
        kind, epoch = self.jobs.pop(0)
        if kind == "start":
            assert not any(self.ranks.values()), "two epochs have processes"
            self.ranks[epoch] = {number: PlayedRank() for number in RANKS}
            return
        self.ranks.pop(epoch, None)
        self.ledger.over(0, epoch)
        self._hear(GroupStopped(0, epoch))

    def _begin_engine(self) -> None:
        self.engine += 1
        epochs = self.ledger.epochs()
        self.group = WorkerGroup(
            0,
            len(RANKS),
            start_timeout_s=300.0,
            policy=RestartPolicy(max_restarts=1),
            now=self.now,
            before=epochs[0] if epochs else None,
            takeover_s=TAKEOVER_S,
        )
        if not epochs:
            self._start(1)
        for news in self.ledger.news():
            self._hear(news)

    def _hear(self, news: WorkerFailed | GroupStopped) -> None:
        if self.group is None:
            return
        if isinstance(news, WorkerFailed):
            self._follow(self.group.failed(news.epoch, news.rank, news.message, now=self.now))
        else:
            self._follow(self.group.stopped(news.epoch, self.now))

    def _start(self, epoch: int) -> None:
        assert epoch >= self.epoch, "an epoch fell"
        self.epoch = epoch
        self.ledger.begins(0, epoch)
        self.jobs.append(("start", epoch))

    def _follow(self, instructions: Iterable[Instruction]) -> None:
        found = list(instructions)
        if self.unheard and found:
            self.unheard, self.group = False, None
            return
        for instruction in found:
            match instruction:
                case LetLoad(peers=peers):
                    self._tell(peers, "may load")
                case SizePool(peers=peers):
                    self._tell(peers, "sized")
                case Serve(epoch=epoch):
                    self.ledger.ready(0, epoch)
                case Lose(epoch=epoch, restarts=restarts):
                    self.ledger.lost(0, epoch, restarts=restarts)
                    self.jobs.append(("stop", epoch))
                case Start(epoch=epoch):
                    self._start(epoch)
                case Refuse(peer=peer):
                    epoch, number, _ = map(int, peer.split(b"."))
                    self._exit(epoch, number)

    def _tell(self, peers: Iterable[bytes], stage: Literal["may load", "sized"]) -> None:
        for peer in peers:
            epoch, number, engine = map(int, peer.split(b"."))
            rank = self.ranks.get(epoch, {}).get(number)
            if rank is not None and rank.engine == engine:
                rank.stage = stage

    # --- the way on ---

    @property
    def is_settled(self) -> bool:
        """Whether it serves, or is given up with nothing left."""
        if self.group is None or self.jobs:
            return False
        if self.group.state == "stopped":
            return not any(self.ranks.values())
        ranks = self.ranks.get(self.epoch, {})
        return self.group.state == "ready" and all(
            number in ranks and ranks[number].engine == self.engine for number in RANKS
        )

    def settle(self) -> None:
        """Nothing more goes wrong."""
        for _ in range(MOST_DUTIES):
            if self.is_settled:
                return
            duties = [*self.duties()]
            if not duties:
                assert self.present().next_deadline is not None, "it waits for ever"
            self.happen(duties[0] if duties else ("tick", 0))
        raise AssertionError("it goes round and round")


def next_worlds(world: World) -> Iterator[World]:
    events = [*world.duties(), *world.faults()]
    if world.group is not None and world.group.next_deadline is not None:
        events.append(("tick", 0))
    for event in events:
        following = copy.deepcopy(world)
        following.happen(event)
        yield following


@pytest.mark.parametrize("most_engine_ends", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_in_every_order_of_ends_there_is_a_way_on(most_engine_ends: int) -> None:
    first = World(most_engine_ends)
    seen = {first.key + str(first.unheard)}
    waiting = deque([first])
    settled: set[str] = set()
    while waiting:
        world = waiting.popleft()
        assert len(seen) < MOST_STATES
        end = copy.deepcopy(world)
        end.unheard = False
        end.settle()
        settled.add(end.present().state)
        for following in next_worlds(world):
            key = following.key + str(following.unheard)
            if key not in seen:
                seen.add(key)
                waiting.append(following)
    assert settled == {"ready", "stopped"}
    assert len(seen) > 400 * most_engine_ends
