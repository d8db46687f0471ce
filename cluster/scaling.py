"""Which worker groups come and go when their number changes while the cluster serves.

Decides and drives the groups' state machines; the engine follows what they ask for. A group that
leaves keeps its number: the next one that is needed takes it under a new epoch, and with it the
cores or the GPU that go with the number.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from cluster.autoscale import AutoscalePolicy, Autoscaler, Load
from cluster.group_instructions import Instruction, Start
from cluster.groups import State, WorkerGroup
from scheduler.scheduler import Scheduler
from scheduler.stats import GroupStats

GIB = 2**30

MOST_GROUPS = 1024
"""More than any core can drive; a number from a client that is larger is a slip."""

LOOK_S = 1.0
"""How often load is looked at where it decides."""

COMES_OR_GOES: tuple[State, ...] = ("starting", "sizing", "waiting", "lost", "draining", "retiring")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleLimits:
    """How many groups there may be."""

    num_groups: int
    """At the start."""
    min_groups: int | None = None
    max_groups: int | None = None
    """None: as many as can be started."""
    drain_s: float = 0.0
    """For what runs in a group that leaves; then it goes on in another."""

    @property
    def policy(self) -> AutoscalePolicy | None:
        """By what load decides; None: only who asks does."""
        if self.min_groups is None or self.max_groups is None or self.min_groups >= self.max_groups:
            return None
        return AutoscalePolicy(min_groups=self.min_groups, max_groups=self.max_groups)


class Scaling:
    """The number of groups that is wanted, and the way there."""

    def __init__(
        self,
        limits: ScaleLimits,
        groups: dict[int, WorkerGroup],
        new_group: Callable[[int, float], WorkerGroup],
        why_no_room: Callable[[int], str],
        drained_nodes: Collection[str] = (),
    ) -> None:
        """
        Args:
            groups: the engine's, of which this adds to.
            new_group: makes one of a number, at a time.
            why_no_room: for so many more groups; empty if there is.
            drained_nodes: on which no group may stay.
        """
        self._limits, self._groups, self._new_group = limits, groups, new_group
        self._why_no_room = why_no_room
        self._drained_nodes = drained_nodes
        self.num_wanted = limits.num_groups
        self._autoscaler = None if limits.policy is None else Autoscaler(limits.policy)
        self.is_automatic = self._autoscaler is not None
        self._next_look: float | None = None

    @property
    def next_deadline(self) -> float | None:
        return self._next_look if self.is_automatic else None

    def why_not(self, num_groups: int | None) -> str:
        """Why so many groups cannot be; empty if they can."""
        limits = self._limits
        if num_groups is None:
            return "" if self._autoscaler else NOT_AUTOMATIC
        if num_groups < 1:
            return f"num_groups={num_groups}: at least 1 group must serve. Stop the cluster instead"
        if num_groups > MOST_GROUPS:
            return f"num_groups={num_groups}: one engine drives at most {MOST_GROUPS} groups"
        most = limits.max_groups
        if most is not None and num_groups > most:
            return (
                f"num_groups={num_groups} is above the {most} that memory and cores were dealt out "
                f"to when the cluster started. Start it with max_groups={num_groups}; on CPUs, "
                "groups that have their memory from kv_cache_memory_bytes or num_kv_blocks have "
                "no such limit"
            )
        num_more = num_groups - sum(group.is_wanted for group in self._groups.values())
        return self._why_no_room(num_more) if num_more > 0 else ""

    def change(self, num_groups: int | None, now: float) -> list[Instruction]:
        """Want so many groups; None: as many as load asks for. `why_not` was asked."""
        self.is_automatic = num_groups is None
        if num_groups is None:
            self._next_look = now
            return []
        return self._aim(num_groups, now)

    def keep_time(self, scheduler: Scheduler, now: float) -> list[Instruction]:
        """Let go of groups that have nothing to do any more, and look at the load."""
        found: list[Instruction] = []
        for group in self._groups.values():
            if group.state == "draining" and _is_idle(scheduler, group.group):
                found += group.retire()
        if self.is_automatic and (self._next_look is None or now >= self._next_look):
            self._next_look = now + LOOK_S
            assert self._autoscaler is not None
            load = load_of(scheduler, self._groups.values(), now)
            present = sum(group.is_wanted for group in self._groups.values())
            wanted = self._autoscaler.wanted(present, load, now)
            if wanted != present and not self.why_not(wanted):
                found += self._aim(wanted, now)
        return found

    def fill(self, num_staying: int, now: float) -> list[Instruction]:
        """Start what is missing to the number that is wanted, if only so many stay."""
        missing = range(self.num_wanted - num_staying)
        return [instruction for _ in missing for instruction in self._one_more(now)]

    def _aim(self, num_groups: int, now: float) -> list[Instruction]:
        self.num_wanted = num_groups
        wanted = [group for group in self._groups.values() if group.is_wanted]
        found: list[Instruction] = []
        for group in _least_useful(wanted)[: max(0, len(wanted) - num_groups)]:
            found += group.drain(self._limits.drain_s, now)
        for _ in range(num_groups - len(wanted)):
            found += self._one_more(now)
        return found

    def _one_more(self, now: float) -> list[Instruction]:
        """One that is about to leave stays; else one that has left comes back; else a new one."""
        groups = sorted(self._groups.values(), key=lambda group: group.group)
        for group in groups:
            if group.state == "draining" and not group.is_on(self._drained_nodes):
                return group.stay()
        for group in groups:
            if group.state in ("retired", "stopped"):
                return group.come_back(now)
        number = groups[-1].group + 1
        group = self._groups[number] = self._new_group(number, now)
        return [Start(number, group.epoch)]


NOT_AUTOMATIC = (
    "the cluster was started without limits between which load could decide. Start it with "
    "min_groups and max_groups, or say how many groups there shall be"
)


def why_no_room(
    num_more: int,
    groups: Iterable[WorkerGroup],
    stats: Iterable[GroupStats],
    host: str,
    free_bytes: int,
) -> str:
    """Why so many more groups like those that serve do not fit on the CPUs of a host.

    Pages of a pool are taken as they are first written, so what the present pools may still grow
    by is not free.

    Args:
        free_bytes: of the host, before anything of the new groups is there.
    """
    stats_by_group = {each.group: each for each in stats}
    serving = [group for group in groups if group.group in stats_by_group]
    if not serving or not all(group.computes_on(host) for group in serving):
        return ""
    one = serving[0].host_bytes
    unwritten = sum(
        group.block_bytes * (each.num_blocks - each.peak_blocks)
        for group in serving
        for each in (stats_by_group[group.group],)
    )
    room = free_bytes - unwritten
    if num_more * one <= room:
        return ""
    return (
        f"{num_more} more groups need {num_more * one / GIB:.2f} GiB, {one / GIB:.2f} each; "
        f"{max(0, room) / GIB:.2f} GiB are left of {free_bytes / GIB:.2f} free ones, since the "
        f"pools of {len(serving)} groups may still grow by {unwritten / GIB:.2f}. Lower "
        "kv_cache_memory_bytes or num_kv_blocks, or free memory"
    )


def load_of(scheduler: Scheduler, groups: Iterable[WorkerGroup], now: float) -> Load:
    """What the autoscaler wants to know."""
    groups = list(groups)
    ready = [
        scheduler.groups[group.group]
        for group in groups
        if group.state == "ready" and group.group in scheduler.groups
    ]
    first = min((sequence.arrival for sequence in scheduler.waiting), default=now)
    slots = len(ready) * scheduler.config.max_num_seqs
    blocks = sum(group.cache.num_blocks for group in ready)
    running = sum(group.num_running for group in ready)
    held = blocks - sum(group.cache.num_idle for group in ready)
    shares = (running / slots, held / blocks) if ready else (0.0,)
    return Load(
        num_ready=len(ready),
        is_changing=any(group.state in COMES_OR_GOES for group in groups),
        queue_s=now - first,
        taken_share=max(shares),
    )


def _is_idle(scheduler: Scheduler, group_id: int) -> bool:
    group = scheduler.groups.get(group_id)
    return group is None or not (group.num_running or group.unanswered or group.leaving)


def _least_useful(groups: list[WorkerGroup]) -> list[WorkerGroup]:
    """Those that do not serve yet first, then the highest numbers."""
    return sorted(groups, key=lambda group: (group.state == "ready", -group.group))
