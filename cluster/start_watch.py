"""What a start waits for: each group that is not ready, its ranks, how far each has come.

Pure: it is told what happens, with the time, and says who waits for what, and when to say so.
"""

from dataclasses import dataclass, field

from cluster.messages.workers import RankPhase

SAY_EVERY_S = 10.0
"""Between two lines of the log about the same wait."""

_DOING = {
    "meet": "loads its libraries and meets the other ranks",
    "wait": "waits for the engine, or for ranks that it has not met",
    "load": "loads weights",
    "profile": "runs the largest step, or waits for ranks that do",
    "allocate": "allocates its K/V",
}


def phase_text(phase: RankPhase | None) -> str:
    """What a rank does, in words."""
    if phase is None:
        return "has not reached the engine"
    doing = _DOING.get(phase.phase, phase.phase)
    if not phase.total:
        return doing
    return f"{doing}: {phase.done / 1e6:,.0f} of {phase.total / 1e6:,.0f} MB read"


def progress_of(phase: RankPhase | None) -> tuple[int, int]:
    """Grows as a rank comes further."""
    if phase is None:
        return (-1, 0)
    phases = list(_DOING)
    return (phases.index(phase.phase) if phase.phase in phases else len(phases), phase.done)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One thing that a start waits for."""

    who: str
    """A rank as GROUP.RANK, a group that has no ranks yet, or what there is one of."""
    node: str = ""
    doing: str
    seconds: float
    """Since it came that far."""

    def text(self) -> str:
        where = f" on {self.node}" if self.node else ""
        return f"{self.who}{where} {self.doing} (for {self.seconds:.0f} s)"


@dataclass(slots=True)
class _Start:
    """One group's start."""

    epoch: int
    began: float
    is_placed: bool = False
    phases: dict[int, tuple[RankPhase, float]] = field(default_factory=dict)


class StartWatch:
    """All starts of one cluster: the first of each group, and restarts."""

    def __init__(self, num_ranks: int, every_s: float = SAY_EVERY_S) -> None:
        """`num_ranks`: of one group."""
        self._num_ranks = num_ranks
        self._every_s = every_s
        self._starts: dict[int, _Start] = {}
        self._expected: dict[str, tuple[str, float]] = {}
        self._next_line = 0.0

    def expect(self, who: str, doing: str, now: float) -> None:
        """Something that there is one of has been begun."""
        self._begin_lines(now)
        self._expected[who] = (doing, now)

    def came(self, who: str) -> None:
        """It is there."""
        self._expected.pop(who, None)

    def begins(self, group: int, epoch: int, now: float) -> None:
        """Room is being looked for."""
        self._begin_lines(now)
        self._starts[group] = _Start(epoch, now)

    def _begin_lines(self, now: float) -> None:
        if self._is_idle:
            self._next_line = now + self._every_s

    def placed(self, group: int, epoch: int, now: float) -> None:
        """The processes of its ranks are started."""
        start = self._starts.get(group)
        if start is not None and start.epoch == epoch:
            start.began, start.is_placed = now, True

    def moved(self, phase: RankPhase, now: float) -> None:
        """A rank has come further."""
        start = self._starts.get(phase.group)
        if start is None or start.epoch != phase.epoch:
            return
        last = start.phases.get(phase.rank)
        has_moved = last is None or (last[0].phase, last[0].done) != (phase.phase, phase.done)
        if has_moved:
            start.phases[phase.rank] = (phase, now)

    def ended(self, group: int) -> None:
        """It is ready, or lost."""
        self._starts.pop(group, None)

    @property
    def _is_idle(self) -> bool:
        return not self._starts and not self._expected

    @property
    def next_deadline(self) -> float | None:
        """When `due` has something to say."""
        return None if self._is_idle else self._next_line

    def due(self, now: float) -> list[Wait]:
        """What to say now; nothing between two times of it."""
        if self._is_idle or now < self._next_line:
            return []
        self._next_line = now + self._every_s
        return self.waits(now)

    def waits(self, now: float) -> list[Wait]:
        """Everything that is waited for."""
        waits = [
            Wait(who=who, doing=doing, seconds=now - since)
            for who, (doing, since) in self._expected.items()
        ]
        for group, start in sorted(self._starts.items()):
            waits += self._of(group, start, now)
        return waits

    def _of(self, group: int, start: _Start, now: float) -> list[Wait]:
        if not start.is_placed:
            doing = "waits for room, or for its processes to start"
            return [Wait(who=f"group {group}", doing=doing, seconds=now - start.began)]
        waits = []
        for rank in range(self._num_ranks):
            phase, since = start.phases.get(rank, (None, start.began))
            waits.append(
                Wait(
                    who=f"rank {group}.{rank}",
                    node="" if phase is None else phase.node,
                    doing=phase_text(phase),
                    seconds=now - since,
                )
            )
        return waits
