"""Other weights for a cluster that serves: one group after the other leaves and comes back.

What runs in a group that leaves goes on in the others; with one group it waits until that is back.
If a start with the new weights fails, the groups that have them go back to the old ones, in the
same way. A state machine without I/O: events in, instructions out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from cluster.group_instructions import Instruction, Lose
from cluster.groups import State, WorkerGroup

PRESENT: tuple[State, ...] = ("starting", "sizing", "ready")
"""States of groups that may have the old weights."""


@dataclass(frozen=True, slots=True)
class UseWeights:
    """Groups that start from now on load these."""

    model_dir: Path


Order: TypeAlias = Instruction | UseWeights


class Reload:
    """The way of all groups from one checkpoint to another; one at a time."""

    def __init__(self, groups: Mapping[int, WorkerGroup], model_dir: Path) -> None:
        """
        Args:
            groups: the engine's.
            model_dir: that they have.
        """
        self._groups = groups
        self.model_dir = model_dir
        """That groups which start now load"""
        self._before = model_dir
        self._goes_back = False
        self._epochs: dict[int, int] = {}
        """Of each group when the weights to use were changed; a later one has these."""
        self._to_go: list[int] = []
        self._done: list[int] = []
        self._current: tuple[int, int] | None = None
        """The group on its way, and its epoch with the weights that it had."""
        self.failure = ""
        """Why the last one was given up, and the old weights are back; empty: it was not."""

    @property
    def is_running(self) -> bool:
        return bool(self._to_go) or self._current is not None

    @property
    def num_groups(self) -> int:
        """That the one which runs, or ran last, is about"""
        return self.num_done + len(self._to_go) + (self._current is not None)

    @property
    def num_done(self) -> int:
        """Groups that have come back."""
        return len(self._done)

    def begin(self, model_dir: Path, now: float) -> list[Order]:
        """Bring all groups to this checkpoint."""
        assert not self.is_running
        self._before, self.model_dir = self.model_dir, model_dir
        self.failure, self._goes_back = "", False
        self._done = []
        self._epochs = self._present_epochs()
        self._to_go = sorted(self._groups)
        return [UseWeights(model_dir), *self.keep_time(now)]

    def keep_time(self, now: float) -> list[Order]:
        """Let the next group go when the one before is back."""
        if self._current is not None and not self._has_come():
            return []
        while self._to_go:
            group = self._groups[self._to_go[0]]
            if group.epoch > self._epochs[group.group]:  # it was lost, and started again
                self._done.append(self._to_go.pop(0))
            elif group.state not in PRESENT:  # when it starts, it starts with the new ones
                self._to_go.pop(0)
            elif self._may_leave(group):
                self._current = self._to_go.pop(0), group.epoch
                return list(group.renew())
            else:
                return []
        return []

    def _has_come(self) -> bool:
        """Whether the group on its way is there, or somebody else has sent it away."""
        assert self._current is not None
        number, epoch = self._current
        group = self._groups[number]
        if group.state == "ready" and group.epoch > epoch:
            self._done.append(number)
        elif group.has_hope:
            return False
        self._current = None
        return True

    def _may_leave(self, group: WorkerGroup) -> bool:
        """Whether another group takes over, or none will."""
        others = [other for other in self._groups.values() if other is not group]
        return (
            group.state != "ready"
            or any(other.state == "ready" for other in others)
            or not any(other.has_hope for other in others)
        )

    def lost(self, lost: Lose) -> list[Order]:
        """A group was lost; what follows before its processes have ended."""
        if not self.is_running or lost.was_ready or self._goes_back:
            return []
        self.failure, self._goes_back = f"group {lost.group}: {lost.message}", True
        have_new = (
            number
            for number, group in self._groups.items()
            if number != lost.group and group.epoch > self._epochs.get(number, 0)
        )
        self._to_go = [] if self.model_dir == self._before else sorted(have_new)
        self._epochs = self._present_epochs()
        self._done, self.model_dir = [], self._before
        return [UseWeights(self._before)]

    def _present_epochs(self) -> dict[int, int]:
        return {number: group.epoch for number, group in self._groups.items()}
