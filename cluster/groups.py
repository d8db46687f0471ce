"""The life of a worker group as a state machine without I/O: events in, instructions out.

    starting ──all hellos──> sizing ──all ready──> ready
        │                       │                    │
        └───────failure─────────┴──────failure───────┘
                                │
    starting <─pause over─ waiting <─no process left, may restart─ lost ─or not─> stopped

A group that is not needed any more leaves in order, and may come back under a new epoch:

    ready ──> draining ──nothing runs, or time is over──> retiring ──no process left──> retired

One that is renewed retires and starts at once, without a pause between.

Invariants: the epoch rises with every start and never falls; in one epoch a group serves at
most once and is lost at most once, and never serves after it was lost; it starts again only
when no process of the epoch before is left, so that two epochs never compute side by side.

When the engine itself was lost, the next one begins each group where it was: ranks that have their
weights have `takeover_s` to come back, under the same epoch.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from cluster.engine_launch import GroupEpoch
from cluster.group_instructions import (
    Drain,
    Instruction,
    LetLoad,
    Lose,
    Refuse,
    Retire,
    Serve,
    SizePool,
    Start,
)
from cluster.loss_reasons import LossReason
from cluster.messages.reports import RankStatus
from cluster.messages.workers import NodeFacts, RankPhase, WorkerGreeting, WorkerHello
from cluster.node_address import names_of
from cluster.start_watch import phase_text, progress_of

EXPLANATION_S = 1.0
"""How long the loss of a rank waits for its reason. More: better messages, requests that make ranks
die are found out more surely, and what nobody explains is got over later."""

RANK_BYTES = 170 << 20
"""Of a CPU rank's process beside weights, steps and K/V."""

State: TypeAlias = Literal[
    "starting", "sizing", "ready", "lost", "waiting", "stopped", "draining", "retiring", "retired"
]

GONE: tuple[State, ...] = ("stopped", "retiring", "retired")
"""States in which a group computes nothing and will not by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Whether a lost group comes back. A group that never was ready does not."""

    max_restarts: int = 0
    """Restarts in a row, without `stable_s` of service between them. A start that fails counts as
    well. 0: a lost group stays lost."""
    first_pause_s: float = 1.0
    """Before the first restart; each further pause is twice as long."""
    longest_pause_s: float = 30.0
    stable_s: float = 60.0
    """Service that makes earlier losses forgotten."""


@dataclass(slots=True)
class Rank:
    """One worker of the present epoch that has said hello."""

    peer: bytes
    hello: WorkerHello
    is_ready: bool = False


class WorkerGroup:
    """One group. Whoever owns it starts the ranks of epoch 1 unasked, at once."""

    def __init__(
        self,
        group: int,
        num_ranks: int,
        *,
        start_timeout_s: float,
        policy: RestartPolicy,
        now: float,
        num_stages: int = 1,
        before: GroupEpoch | None = None,
        takeover_s: float = 0.0,
    ) -> None:
        """
        Args:
            before: where another engine left it; None: it begins.
            takeover_s: how long ranks that were ready then have to come back.
        """
        self.group = group
        self._ranks_per_stage = num_ranks // num_stages
        self.num_ranks = num_ranks
        self.epoch = 1
        self.state: State = "starting"
        self.ranks: dict[int, Rank] = {}
        self._greeted: dict[int, tuple[bytes, NodeFacts]] = {}
        self._may_load: set[bytes] = set()
        """Who was told so; a rank that has lost its connection comes as another peer."""
        self._phases: dict[int, RankPhase] = {}
        self.num_blocks = 0
        self.message = ""
        """Why it was lost last."""
        self.num_losses = 0
        """In all, those of starts that failed included."""
        self.num_restarts = 0
        """In all."""
        self.max_model_len = 0
        self.vocab_size = 0
        self._policy = policy
        self._start_timeout_s = start_timeout_s
        self._wake_at: float | None = now + start_timeout_s
        self._left: tuple[int, float, str, int] | None = None
        """A rank whose connection to us or to another rank ended, until when somebody may say why,
        what we say else, and at which step."""
        self.was_hit = False
        """Whether a fault was ordered for it in this epoch."""
        self._was_ever_ready = False
        self._ready_since = 0.0
        self._num_in_row = 0
        """Restarts since it last served for long."""
        self._num_promised = 0
        """Starts that it has whatever came before, each after the processes of the last one."""
        self._takeover_s = 0.0
        """How long ranks that are loaded may take to come back; 0: they start."""
        if before is not None:
            self._take_over(before, takeover_s, now)

    def _take_over(self, before: GroupEpoch, takeover_s: float, now: float) -> None:
        self.epoch, self._was_ever_ready = before.epoch, before.was_ready
        match before.state:
            case "stopped" | "retired":
                self._forget_ranks(before.state)
            case "ready":
                self._takeover_s = takeover_s
                self._wake_at = now + takeover_s

    # --- what is asked of it ---

    @property
    def peers(self) -> tuple[bytes, ...]:
        """Of the ranks that have said hello, in the order of ranks."""
        return tuple(self.ranks[rank].peer for rank in sorted(self.ranks))

    @property
    def start_s(self) -> dict[str, float]:
        """What the rank that was loaded last, for which the others waited, says of its start."""
        return [rank.hello.start_s for rank in self.ranks.values()][-1]

    @property
    def next_deadline(self) -> float | None:
        """When `tick` must be called next."""
        if self._left is None:
            return self._wake_at
        return self._left[1] if self._wake_at is None else min(self._left[1], self._wake_at)

    @property
    def has_hope(self) -> bool:
        """Whether it computes, or may do so some time."""
        return self.state not in (*GONE, "lost") or self._may_restart

    @property
    def is_wanted(self) -> bool:
        """Whether it counts as one of the cluster's groups: it computes or will, and stays."""
        return self.has_hope and self.state != "draining"

    @property
    def restarts(self) -> bool:
        """Whether it is lost and will be started again."""
        return self.state == "waiting" or (self.state == "lost" and self._may_restart)

    @property
    def _may_restart(self) -> bool:
        if self._num_promised or self.state in GONE:
            return self._num_promised > 0
        return self._was_ever_ready and self._num_in_row < self._policy.max_restarts

    def is_on(self, nodes: Collection[str]) -> bool:
        """Whether a rank is on one of these nodes, by any name that the node goes by."""
        names = [names_of(facts.node) for _, facts in self._greeted.values()]
        names += [(rank.hello.host,) for rank in self.ranks.values()]
        return any(name in nodes for each in names for name in each)

    def computes_on(self, host: str) -> bool:
        """Whether its ranks compute on CPUs of this host."""
        return bool(self.ranks) and all(
            rank.hello.capacity.device == "cpu" and rank.hello.host == host
            for rank in self.ranks.values()
        )

    @property
    def block_bytes(self) -> int:
        """Of one block, on all ranks."""
        return sum(rank.hello.capacity.block_bytes for rank in self.ranks.values())

    @property
    def host_bytes(self) -> int:
        """That another such group takes of the host when every block has been written: a step,
        K/V, and weights unless they are shared."""
        each = (rank.hello.capacity for rank in self.ranks.values())
        fixed = sum(
            one.weight_bytes - one.shared_bytes + one.activation_bytes + RANK_BYTES for one in each
        )
        return fixed + self.num_blocks * self.block_bytes

    def rank_statuses(self) -> tuple[RankStatus, ...]:
        if self.state in ("retiring", "retired"):
            return ()
        return tuple(self._rank_status(rank) for rank in range(self.num_ranks))

    def _rank_status(self, number: int) -> RankStatus:
        rank, stage = self.ranks.get(number), number // self._ranks_per_stage
        if rank is None:
            _, facts = self._greeted.get(number, (b"", NodeFacts(node="")))
            return RankStatus(rank=number, state="starting", stage=stage, host=facts.node)
        return RankStatus(
            rank=number,
            stage=stage,
            state="ready" if rank.is_ready else "loaded",
            host=rank.hello.host,
            pid=rank.hello.pid,
            device=rank.hello.capacity.device,
            num_blocks=rank.hello.capacity.num_blocks,
            weight_bytes=rank.hello.capacity.weight_bytes,
        )

    # --- events ---

    def greet(
        self, peer: bytes, greeting: WorkerGreeting, difference: str, now: float
    ) -> list[Instruction]:
        """A rank is there. `difference`: why its node cannot be one of the group's, if so."""
        complaint = self._complaint(greeting)
        if complaint:
            return [Refuse(peer, complaint)]
        if difference:
            return self.failed(self.epoch, greeting.rank, difference, now=now)
        self._greeted[greeting.rank] = (peer, greeting.facts)
        if len(self._greeted) < self.num_ranks:
            return []
        untold = tuple(peer for peer, _ in self._greeted.values() if peer not in self._may_load)
        self._may_load.update(untold)
        return [LetLoad(self.group, untold)]

    def moved(self, phase: RankPhase) -> bool:
        """A rank has come further in its start; whether that is of the present epoch."""
        if phase.epoch != self.epoch or not 0 <= phase.rank < self.num_ranks:
            return False
        self._phases[phase.rank] = phase
        return True

    def hello(self, peer: bytes, hello: WorkerHello, now: float) -> list[Instruction]:
        """A rank has loaded its weights and says what it can hold."""
        complaint = self._complaint(hello)
        if complaint:
            return [Refuse(peer, complaint)]
        self.ranks[hello.rank] = Rank(peer, hello)
        if len(self.ranks) < self.num_ranks:
            return []
        capacities = [rank.hello.capacity for rank in self.ranks.values()]
        limits = {(each.vocab_size, each.max_model_len) for each in capacities}
        if len(limits) != 1:
            return self.failed(
                self.epoch,
                -1,
                "the ranks loaded different models: (vocab_size, max_model_len) are "
                f"{sorted(limits)}. Give every node the same checkpoint",
                now=now,
            )
        self.vocab_size, self.max_model_len = limits.pop()
        self.num_blocks = min(each.num_blocks for each in capacities)
        self.state = "sizing"
        return [SizePool(self.group, self.peers, self.num_blocks)]

    def _complaint(self, hello: WorkerGreeting | WorkerHello) -> str:
        if hello.epoch != self.epoch:
            return f"group {self.group} is at epoch {self.epoch}; epoch {hello.epoch} is over"
        if self.state != "starting":
            return f"group {self.group} is {self.state} and takes no more ranks"
        if not 0 <= hello.rank < self.num_ranks:
            return f"group {self.group} has ranks 0 to {self.num_ranks - 1}, not {hello.rank}"
        if hello.rank in self.ranks:
            return f"rank {hello.rank} of group {self.group} is here already"
        return ""

    def ready(self, peer: bytes, now: float) -> list[Instruction]:
        """A rank has allocated its pool."""
        number = self.rank_of(peer)
        if number is None:
            return []
        if self.state != "sizing" or self.ranks[number].is_ready:
            return self.failed(
                self.epoch,
                number,
                f"said that it is ready while the group is {self.state}",
                now=now,
            )
        self.ranks[number].is_ready = True
        if not all(rank.is_ready for rank in self.ranks.values()):
            return []
        self.state = "ready"
        self._num_promised = 0
        self._was_ever_ready = True
        self._ready_since = now
        self._takeover_s = 0.0
        self._wake_at = None
        return [Serve(self.group, self.epoch, self.num_blocks)]

    def failed(
        self,
        epoch: int,
        rank: int,
        message: str,
        *,
        reason: LossReason = "died",
        step: int = 0,
        now: float,
    ) -> list[Instruction]:
        """A rank, or the group (-1), cannot go on. Only the first failure of an epoch counts, but
        that something was cut waits for a better explanation."""
        if epoch != self.epoch or self.state not in ("starting", "sizing", "ready", "draining"):
            return []
        if reason == "cut":
            self._left = self._left or (rank, now + EXPLANATION_S, message, step)
            return []
        return self._lost(rank, message, reason, step, now)

    def _lost(
        self, rank: int, message: str, reason: LossReason, step: int, now: float
    ) -> list[Instruction]:
        retires = self.state == "draining"
        was_ready = self.state in ("ready", "draining")
        if was_ready and now - self._ready_since >= self._policy.stable_s:
            self._num_in_row = 0
        self.message = message
        self.num_losses += 1
        self._forget_ranks("retiring" if retires else "lost")
        return [
            Lose(
                group=self.group,
                epoch=self.epoch,
                message=message,
                rank=rank,
                step=step,
                was_ready=was_ready,
                restarts=self._may_restart and not retires,
                reason=reason if was_ready else "start",
                retires=retires,
                was_hit=self.was_hit,
            )
        ]

    def _forget_ranks(self, state: State) -> None:
        self.state = state
        self.ranks.clear()
        self._greeted.clear()
        self._may_load.clear()
        self._takeover_s = 0.0
        self._phases.clear()
        self._left = None
        self._wake_at = None

    def left(self, peer: bytes, now: float) -> list[Instruction]:
        """The connection of a rank ended. Whoever watches its process may say why in a moment."""
        number = self.rank_of(peer)
        if number is None:
            return []
        return self.failed(self.epoch, number, "its connection ended", reason="cut", now=now)

    def stopped(self, epoch: int, now: float) -> list[Instruction]:
        """No process of this epoch is left."""
        if epoch != self.epoch:
            return []
        lost = self.failed(epoch, -1, "all its processes ended", reason="ended", now=now)
        if self.state == "retiring":
            self.state = "retired"
        if self.state in ("retired", "lost") and self._num_promised:
            self._num_promised -= 1
            return [*lost, self._start(now)]
        if self.state == "lost":
            if self._may_restart:
                pause_s = self._policy.first_pause_s * 2**self._num_in_row
                self._wake_at = now + min(pause_s, self._policy.longest_pause_s)
                self._num_in_row += 1
                self.state = "waiting"
            else:
                self.state = "stopped"
        return lost

    def excuse(self) -> None:
        """Its losses were a request's fault, and nothing is held against it any more."""
        self._num_in_row = 0

    # --- leaving, and coming back ---

    def drain(self, drain_s: float, now: float) -> list[Instruction]:
        """The group is not needed any more; what runs there has `drain_s` to end."""
        match self.state:
            case "ready":
                self.state = "draining"
                self._wake_at = now + drain_s
                return [Drain(self.group)]
            case "starting" | "sizing":
                return self.retire()
            case "lost" | "retiring":  # what is left of its processes is being ended already
                self.state = "retiring"
                self._num_promised = 0
            case "waiting" | "stopped":
                self._forget_ranks("retired")
        return []

    def retire(self) -> list[Instruction]:
        """Go at once; what still runs there goes on elsewhere."""
        assert self.state in ("starting", "sizing", "ready", "draining"), self.state
        self.message = ""
        self._num_promised = 0
        self._forget_ranks("retiring")
        return [Retire(self.group, self.epoch)]

    def renew(self) -> list[Instruction]:
        """Go at once, and start again when no process is left. If that start fails, there is
        another one, for which what made it fail may have been undone."""
        self.retire()
        self._num_promised = 2
        return [Retire(self.group, self.epoch, comes_back=True)]

    def stay(self) -> list[Instruction]:
        """A draining group is needed after all."""
        assert self.state == "draining", self.state
        self.state = "ready"
        self._wake_at = None
        return [Drain(self.group, drains=False)]

    def come_back(self, now: float) -> list[Instruction]:
        """Start again a group that has left, or that could not go on."""
        assert self.state in ("retired", "stopped"), self.state
        self._was_ever_ready = False
        self._num_in_row = 0
        self._num_promised = 0
        self.message = ""
        return [self._start(now)]

    def _start(self, now: float) -> Start:
        self.epoch += 1
        self.was_hit = False
        self.state = "starting"
        self._wake_at = now + self._start_timeout_s
        return Start(self.group, self.epoch)

    def tick(self, now: float) -> list[Instruction]:
        """Time has passed: a pause may be over, or a start may have taken too long."""
        if self._left is not None and now >= self._left[1]:
            rank, _, message, step = self._left
            return self._lost(rank, message, "cut", step, now)
        if self._wake_at is None or now < self._wake_at:
            return []
        if self.state == "waiting":
            self.num_restarts += 1
            return [self._start(now)]
        if self.state == "draining":
            return self.retire()
        if self._takeover_s:
            return self._not_taken_over(now)
        waited = f"not ready within start_timeout_s={self._start_timeout_s:g}"
        if self.state == "starting":
            missing = sorted(set(range(self.num_ranks)) - self.ranks.keys())
            why = f"{waited}: ranks {missing} have not loaded the model: {self._doing(missing)}"
        else:
            missing = sorted(n for n, rank in self.ranks.items() if not rank.is_ready)
            why = (
                f"{waited}: ranks {missing} have not allocated their KV blocks: "
                f"{self._doing(missing)}"
            )
        return self.failed(self.epoch, self._slowest(missing), why, now=now)

    def _not_taken_over(self, now: float) -> list[Instruction]:
        missing = [n for n in range(self.num_ranks) if n not in self.ranks]
        why = (
            f"ranks {missing} did not come to the new engine within takeover_s={self._takeover_s:g}"
            if missing
            else f"not ready within takeover_s={self._takeover_s:g} of the new engine"
        )
        return self.failed(self.epoch, missing[0] if missing else -1, why, now=now)

    def _slowest(self, ranks: Sequence[int]) -> int:
        """Of these ranks the one that has come least far, for which the others may wait."""
        return min(ranks, key=lambda rank: progress_of(self._phases.get(rank)))

    def _doing(self, ranks: Sequence[int]) -> str:
        """What each of these ranks did last, and where."""
        texts = []
        for rank in ranks:
            _, facts = self._greeted.get(rank, (b"", NodeFacts(node="")))
            where = f" on {facts.node}" if facts.node else ""
            texts.append(f"rank {rank}{where} {phase_text(self._phases.get(rank))}")
        return "; ".join(texts)

    def rank_of(self, peer: bytes) -> int | None:
        """Which rank of the present epoch this peer is."""
        for number, rank in self.ranks.items():
            if rank.peer == peer:
                return number
        return None
