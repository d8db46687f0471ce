"""What the supervisor knows of the worker groups, for an engine process that comes after another.

Pure: it is told what happens, and says where each group is (`epochs`) and what the engine must
hear of it (`news`). News are of the present epoch alone and may be heard twice: of a loss only the
first word counts.
"""

from dataclasses import dataclass, field

from cluster.engine_launch import GroupEpoch
from cluster.messages.supervisor import GroupStopped
from cluster.messages.workers import WorkerFailed


@dataclass(slots=True)
class _Group:
    """One group in its present epoch."""

    epoch: int
    was_ready: bool = False
    """Ever"""
    is_ready: bool = False
    is_stopped: bool = False
    """The engine has given it up."""
    is_retired: bool = False
    is_over: bool = False
    """No process of the epoch is left."""
    failures: list[WorkerFailed] = field(default_factory=list)


class GroupLedger:
    """All groups that were ever started, by number."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}

    # --- what happens ---

    def begins(self, group: int, epoch: int) -> None:
        """Its ranks are being started."""
        before = self._groups.get(group)
        if before is None or before.is_retired or before.is_stopped:
            was_ready = False
        else:
            was_ready = before.was_ready
        self._groups[group] = _Group(epoch, was_ready)

    def ready(self, group: int, epoch: int) -> None:
        """It takes plans."""
        if known := self._at(group, epoch):
            known.is_ready = known.was_ready = True

    def lost(self, group: int, epoch: int, *, restarts: bool) -> None:
        """The engine has lost it; what is left of its processes is being ended."""
        if known := self._at(group, epoch):
            known.is_ready, known.is_stopped = False, not restarts

    def retired(self, group: int, epoch: int, *, comes_back: bool = False) -> None:
        """The engine does not need it, or wants it anew; its processes are being ended."""
        if known := self._at(group, epoch):
            known.is_ready, known.is_retired = False, not comes_back

    def failed(self, failure: WorkerFailed) -> None:
        """A rank, or the start of all, has come to its end unasked."""
        if known := self._at(failure.group, failure.epoch):
            known.failures.append(failure)

    def over(self, group: int, epoch: int) -> None:
        """No process of this epoch is left."""
        if known := self._at(group, epoch):
            known.is_ready, known.is_over = False, True

    def _at(self, group: int, epoch: int) -> _Group | None:
        known = self._groups.get(group)
        return known if known is not None and known.epoch == epoch else None

    # --- what is asked ---

    @property
    def num_wanted(self) -> int:
        """Groups that compute or may do so some time."""
        return sum(not (g.is_stopped or g.is_retired) for g in self._groups.values())

    @property
    def num_ready(self) -> int:
        """Groups that took plans from the last engine."""
        return sum(group.is_ready for group in self._groups.values())

    def epochs(self) -> tuple[GroupEpoch, ...]:
        """Where each group is, for a new engine."""
        return tuple(_epoch_of(number, group) for number, group in sorted(self._groups.items()))

    def news(self) -> list[WorkerFailed | GroupStopped]:
        """What an engine must hear of groups that are not, or no longer, as `epochs` says."""
        found: list[WorkerFailed | GroupStopped] = []
        for number, group in sorted(self._groups.items()):
            found += group.failures
            if group.is_over:
                found.append(GroupStopped(number, group.epoch))
        return found


def _epoch_of(number: int, group: _Group) -> GroupEpoch:
    if group.is_retired:
        return GroupEpoch(number, group.epoch, "retired")
    if group.is_stopped:
        return GroupEpoch(number, group.epoch, "stopped", group.was_ready)
    return GroupEpoch(
        number, group.epoch, "ready" if group.is_ready else "starting", group.was_ready
    )
