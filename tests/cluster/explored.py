"""An engine without I/O, and around it a small world in which anything may happen next.

The engine, its scheduler and its groups' state machines are the real ones; sockets, supervisor,
ranks and the client are played here, message by message. What happens next is an event by name, so
that every order of events can be tried, each from the beginning.
"""

import logging
from collections import deque
from dataclasses import dataclass, field

from cluster.engine import Engine
from cluster.engine_launch import EngineLaunch
from cluster.errors import PeerGone
from cluster.links.engine_links import EngineLinks
from cluster.logs import EventLog
from cluster.loss_reasons import LossReason
from cluster.messages.changes import ScaleGroups
from cluster.messages.clients import ClientHello, GenerationDefaults
from cluster.messages.supervisor import (
    GroupLost,
    GroupStopped,
    RetireGroup,
    Shutdown,
    StartGroup,
    SupervisorHello,
)
from cluster.messages.workers import (
    NodeFacts,
    RankCapacity,
    Stop,
    WorkerFailed,
    WorkerGreeting,
    WorkerHello,
    WorkerReady,
)
from cluster.wire import FROM_CLIENT, FROM_ENGINE, PROTOCOL_VERSION, TO_CLIENT, TO_ENGINE
from scheduler.arrays import int32
from scheduler.checks import check_scheduler
from scheduler.config import SchedulerConfig
from scheduler.plan import StepPlan
from scheduler.request import Abort, Finish, Rejection, Request, TokenBatch
from scheduler.sampling import SamplingParams
from tests.scheduler.scripted import VOCAB, ScriptedWorker, expected_output

Event = tuple[str, int]
"""What, and to which group or request."""

DUTIES = ("ended", "greet", "load", "serve", "answer", "tick")
"""What comes to pass if nothing more goes wrong, first things first: the supervisor has ended an
epoch, ranks get further, a step is answered, time passes until somebody has waited long enough."""

NUM_RANKS = 2
NUM_BLOCKS, BLOCK_SIZE = 8, 4
PROMPT_LEN, OUTPUT_LEN = 3, 3

quiet = logging.getLogger("stoker.explored")
quiet.setLevel(logging.CRITICAL)


class PlayedLink:
    """One side of the engine, without a socket."""

    def __init__(self) -> None:
        self.inbox: list[tuple[bytes, bytes | None]] = []
        self.sent: list[tuple[bytes, bytes]] = []
        self.gone: set[bytes] = set()
        self.num_malformed = self.num_turned_away = 0

    def receive(self) -> list[tuple[bytes, bytes | None]]:
        taken, self.inbox = self.inbox, []
        return taken

    def send(self, peer: bytes, frame: bytes) -> None:
        if peer in self.gone:
            raise PeerGone(has_left=True)
        self.sent.append((peer, frame))

    def leave(self, peer: bytes) -> None:
        if peer not in self.gone:
            self.gone.add(peer)
            self.inbox.append((peer, None))


class PlayedLinks:
    """Looks like `EngineLinks`."""

    def __init__(self) -> None:
        self.front, self.back = PlayedLink(), PlayedLink()
        self.num_turned_away = 0


@dataclass
class Epoch:
    """The processes of one epoch of a group."""

    group: int
    epoch: int
    worker: ScriptedWorker
    phase: int = 0
    """How far its ranks are: started, greeted, loaded, ready"""
    dead: set[int] = field(default_factory=set)
    plans: deque[StepPlan] = field(default_factory=deque)
    must_end: bool = False

    def peer(self, rank: int) -> bytes:
        return f"{self.group}.{self.epoch}.{rank}".encode()


@dataclass
class Asked:
    """One request of the client."""

    prompt: list[int]
    handle: int
    tokens: list[int] = field(default_factory=list)
    end: str = ""
    age_s: float = 0.0
    deaths: tuple[str, ...] = ()
    """What is held against it"""

    @property
    def wanted(self) -> list[int]:
        return expected_output(self.prompt, PROMPT_LEN + OUTPUT_LEN, ends=False)


class World:
    """Everything, and what may happen next."""

    def __init__(
        self,
        *,
        num_groups: int,
        num_requests: int,
        budget: dict[str, int],
        max_restarts: int = 1,
        poison_after: int = 0,
        has_poison: bool = False,
    ) -> None:
        """
        Args:
            budget: how often each kind of event may still happen; others may at any time.
            has_poison: whether a rank dies of each step that holds the first request.
        """
        self.has_poison = has_poison
        self.num_poisonings = 0
        """Deaths by the poison"""
        self.now = 0.0
        self.budget = dict(budget)
        self.links = PlayedLinks()
        self.launch = EngineLaunch(
            engine_id="e",
            key="k",
            model="played",
            model_dir="/nowhere",
            front_address="",
            back_address="",
            num_groups=num_groups,
            max_groups=num_groups,
            num_ranks=NUM_RANKS,
            scheduler=SchedulerConfig(
                max_num_seqs=4,
                max_num_batched_tokens=16,
                block_size=BLOCK_SIZE,
                watermark=0.0,
                poison_after=poison_after,
            ),
            max_restarts=max_restarts,
            drain_s=1.0,
        )
        links: EngineLinks = self.links  # type: ignore[assignment]  # it plays one
        self.engine = Engine(
            self.launch,
            links,
            tokenizer=None,
            end_ids=(),
            defaults=GenerationDefaults(),
            journal=None,
            signals=list,
            clock=lambda: self.now,
            log=EventLog("explored"),
        )
        self.epochs: dict[int, list[Epoch]] = {}
        """By group: those with processes, oldest first; more than one would be wrong."""
        self.client = b"client-0"
        self.has_ended = False
        self.last_epoch: dict[int, int] = {}
        self.requests: list[Asked] = []
        self.messages: dict[int, str] = {}
        """By handle: what was said at the end"""
        self.tell(b"supervisor", SupervisorHello(protocol=PROTOCOL_VERSION, engine_id="e", key="k"))
        for group in range(num_groups):
            self.last_epoch[group] = 1
            self.start(group, 1)
        self.ask(ClientHello(protocol=PROTOCOL_VERSION))
        for what in ("greet", "load", "serve"):
            for group in range(num_groups):
                self.do((what, group))
        self.requests = [
            Asked([(at * 7 + i) % (VOCAB - 1) + 1 for i in range(PROMPT_LEN)], at)
            for at in range(num_requests)
        ]
        for asked in self.requests:
            self.submit(asked)
        self.turn()

    # --- messages ---

    def tell(self, peer: bytes, message: object) -> None:
        self.links.back.inbox.append((peer, TO_ENGINE.encode(message)))  # type: ignore[arg-type]

    def ask(self, message: object) -> None:
        self.links.front.inbox.append((self.client, FROM_CLIENT.encode(message)))  # type: ignore[arg-type]

    def submit(self, asked: Asked) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
        self.ask(
            Request(
                handle=asked.handle,
                prompt=int32(asked.prompt),
                sampling=sampling,
                output=int32(asked.tokens),
                age_s=asked.age_s,
                deaths=asked.deaths,
            )
        )

    def start(self, group: int, epoch: int) -> None:
        before = self.epochs.setdefault(group, [])
        assert not before, "two epochs of a group side by side"
        before.append(Epoch(group, epoch, ScriptedWorker(NUM_BLOCKS, BLOCK_SIZE, epoch=epoch)))

    def turn(self) -> None:
        """What the engine does of a loop, and what others make of what it says."""
        if not self.has_ended:
            engine = self.engine
            engine._turn(self.now)
            if engine._is_done():
                engine._end()
                self.has_ended = True
        for peer, frame in self.links.back.sent:
            self.heard(peer, FROM_ENGINE.decode(frame))
        for _, frame in self.links.front.sent:
            self.answered(TO_CLIENT.decode(frame))
        self.links.back.sent.clear()
        self.links.front.sent.clear()
        self.check()

    def heard(self, peer: bytes, message: object) -> None:
        match message:
            case StartGroup(group=group, epoch=epoch):
                assert epoch > self.last_epoch.get(group, 0), "the epoch does not rise"
                self.last_epoch[group] = epoch
                self.start(group, epoch)
            case GroupLost(group=group, epoch=epoch) | RetireGroup(group=group, epoch=epoch):
                for one in self.epochs[group]:
                    one.must_end |= one.epoch == epoch
            case StepPlan():
                group, epoch, rank = (int(part) for part in peer.split(b"."))
                (one,) = self.epochs[group]
                assert one.epoch == epoch == message.epoch
                if rank == 0:
                    one.plans.append(message)
            case Stop():
                pass  # its process ends when the supervisor has seen to it

    def answered(self, message: object) -> None:
        by_handle = {asked.handle: asked for asked in self.requests}
        match message:
            case Rejection(handle=handle, reason=reason):
                by_handle[handle].end = reason
            case TokenBatch():
                counts = message.count.tolist() or [1] * len(message.handle)
                ends = message.finish.tolist() or [0] * len(message.handle)
                tokens = iter(message.token.tolist())
                for handle, count, end in zip(message.handle.tolist(), counts, ends, strict=True):
                    asked = by_handle[handle]
                    assert not asked.end, "news of a request that has ended"
                    asked.tokens += [next(tokens) for _ in range(count)]
                    asked.end = Finish(end).name.lower() if end else ""
                self.messages |= {ended.handle: ended.message for ended in message.ended}
                for told in message.suspected:
                    by_handle[told.handle].deaths = told.deaths

    # --- events ---

    def enabled(self) -> list[Event]:
        """What may happen now."""
        found: list[Event] = []
        for group, epochs in self.epochs.items():
            for one in epochs:
                if one.must_end:
                    found.append(("ended", group))
                    if one.plans and 0 not in one.dead:
                        found.append(("late", group))
                    continue
                if not one.dead and one.phase < 3:
                    found.append((("greet", "load", "serve")[one.phase], group))
                if one.plans and not one.dead:
                    found.append(("answer", group))
                if one.plans and self.budget.get("answer and die") and not one.dead:
                    found.append(("answer and die", group))
                if not one.dead:
                    harms = ("die", "cut", "node", "told to end")
                    found += [(what, group) for what in harms if self.budget.get(what)]
        if self.budget.get("abort"):
            found += [("abort", at) for at, asked in enumerate(self.requests) if not asked.end]
        for what in ("stop", "hand over", "fewer", "more"):
            if self.budget.get(what):
                found.append((what, 0))
        is_idle = not any(what in DUTIES for what, _ in found)
        if not self.has_ended and self.engine._idle_wait_s() is not None:
            if is_idle:
                found.append(("tick", 0))
            elif self.budget.get("hang"):
                found.append(("hang", 0))
        return found

    def do(self, event: Event) -> None:
        """Let it happen, and everybody react."""
        what, at = event
        if what in self.budget:
            self.budget[what] -= 1
        one = self.epochs[at][-1] if self.epochs.get(at) else None
        match what:
            case "greet" | "load" | "serve":
                assert one is not None
                self.come(one)
            case "answer" if one is not None and self.is_poisoned(one):
                self.num_poisonings += 1
                self.die(one)
            case "answer" | "late":
                assert one is not None
                result = one.worker.execute(one.plans.popleft())
                self.tell(one.peer(0), result)
            case "answer and die":
                assert one is not None
                self.tell(one.peer(0), one.worker.execute(one.plans.popleft()))
                self.die(one)
            case "die" | "node" | "told to end":
                assert one is not None
                reasons: dict[str, LossReason] = {"node": "node", "told to end": "ended"}
                self.die(one, reasons.get(what, "died"))
            case "cut":
                assert one is not None
                one.dead.add(1)
                self.links.back.leave(one.peer(1))
            case "ended":
                assert one is not None
                for rank in range(NUM_RANKS):
                    self.links.back.leave(one.peer(rank))
                self.epochs[at].remove(one)
                self.tell(b"supervisor", GroupStopped(one.group, one.epoch))
            case "abort":
                self.ask(Abort(int32([self.requests[at].handle])))
                self.requests[at].end = "left"
            case "stop":
                self.tell(b"supervisor", Shutdown(drain_s=5.0))
            case "fewer" | "more":
                groups = self.launch.num_groups
                self.ask(ScaleGroups(num_groups=groups - (what == "fewer")))
            case "hand over":
                self.hand_over()
            case "tick" | "hang":
                wait_s = self.engine._idle_wait_s()
                assert wait_s is not None
                self.now += wait_s + 1e-6
        self.turn()

    def come(self, one: Epoch) -> None:
        """Its ranks get one phase further."""
        for rank in range(NUM_RANKS):
            names = {"protocol": PROTOCOL_VERSION, "engine_id": "e", "key": "k"}
            who = {"group": one.group, "epoch": one.epoch, "rank": rank}
            capacity = RankCapacity(
                num_blocks=NUM_BLOCKS, block_bytes=1, vocab_size=VOCAB, max_model_len=16
            )
            messages = (
                WorkerGreeting(**names, **who, facts=NodeFacts(node="n")),  # type: ignore[arg-type]
                WorkerHello(**names, **who, capacity=capacity),  # type: ignore[arg-type]
                WorkerReady(),
            )
            self.tell(one.peer(rank), messages[one.phase])
        one.phase += 1

    def die(self, one: Epoch, reason: LossReason = "died") -> None:
        one.dead.add(1)
        self.links.back.leave(one.peer(1))
        who = {"group": one.group, "epoch": one.epoch, "rank": 1}
        failure = WorkerFailed(**who, message="was killed", reason=reason)  # type: ignore[arg-type]
        self.tell(b"supervisor", failure)

    def is_poisoned(self, one: Epoch) -> bool:
        """Whether the step that its ranks compute now holds the poison."""
        scheduler = self.engine._groups.scheduler
        if not self.has_poison or scheduler is None or one.group not in scheduler.groups:
            return False
        serials = scheduler.groups[one.group].unanswered[0].serial.tolist()
        poison = self.requests[0].handle
        return any(
            s.serial in serials for s in scheduler.live.values() if s.request.handle == poison
        )

    def hand_over(self) -> None:
        """The client's connection ends; on another one it submits again what has not ended."""
        self.links.front.leave(self.client)
        self.client = b"client-1"
        self.ask(ClientHello(protocol=PROTOCOL_VERSION))
        for asked in self.requests:
            if not asked.end:
                asked.handle, asked.age_s = asked.handle + 100, 1.0
                self.submit(asked)

    # --- what must hold ---

    def check(self) -> None:
        """In every state."""
        scheduler = self.engine._groups.scheduler
        if scheduler is not None:
            check_scheduler(scheduler)
        for asked in self.requests:
            assert asked.tokens == asked.wanted[: len(asked.tokens)], "a wrong token"
            if asked.end == "length":
                assert asked.tokens == asked.wanted, "a lost token"
        if self.launch.scheduler.poison_after:
            self.check_poison()
        for group, lane in self.engine._groups.lanes.items():
            assert self.engine._groups.groups[group].state in ("ready", "draining")
            assert lane.epoch == self.engine._groups.groups[group].epoch

    def check_poison(self) -> None:
        for at, asked in enumerate(self.requests):
            if self.has_poison and at == 0:
                assert asked.end in ("", "error", "no_workers"), "it cannot be computed"
            else:
                assert asked.end != "error", "an innocent is taken for poison"
        most = self.launch.scheduler.poison_after + max(0, len(self.requests) - 1)
        assert self.num_poisonings <= most, "the poison kills on"

    def is_settled(self) -> bool:
        """Whether every request has ended, and nothing is left of them anywhere."""
        if not all(asked.end for asked in self.requests):
            return False
        scheduler = self.engine._groups.scheduler
        if self.has_ended or scheduler is None:
            return True
        held = [
            group
            for group in scheduler.groups.values()
            if group.unanswered or group.cache.num_idle != group.cache.num_blocks
        ]
        return not held and scheduler.is_idle

    def digest(self) -> tuple[object, ...]:
        """Two worlds of the same digest go on the same way."""
        engine, desk, scheduler = self.engine, self.engine._groups, self.engine._groups.scheduler
        places: list[object] = []
        if scheduler is not None:
            for sequence in scheduler.live.values():
                length = scheduler.length(sequence)
                places.append(
                    (
                        sequence.request.handle,
                        sequence.group_id,
                        sequence.slot >= 0,
                        length,
                        scheduler._suspects.failures(sequence),
                    )
                )
            places += [(g, len(group.unanswered)) for g, group in scheduler.groups.items()]
            places += [s.request.handle for s in scheduler.waiting]
        deadlines = [
            None if at is None else round(at - self.now, 2)
            for at in (
                *(group.next_deadline for group in desk.groups.values()),
                *(desk._step_deadline(lane) for lane in desk.lanes.values()),
                desk._orders.shortage.next_deadline,
                engine._stop_at,
            )
        ]
        return (
            self.has_ended,
            tuple(sorted(self.budget.items())),
            tuple((g.state, g.epoch, g._num_in_row, g.message) for g in desk.groups.values()),
            tuple(deadlines),
            tuple(sorted(desk.lanes)),
            tuple(places),
            tuple(
                (group, one.epoch, one.phase, tuple(one.dead), len(one.plans), one.must_end)
                for group, epochs in self.epochs.items()
                for one in epochs
            ),
            tuple((len(asked.tokens), asked.end, asked.deaths) for asked in self.requests),
            self.num_poisonings,
            desk._changes._scaling.num_wanted,
        )
