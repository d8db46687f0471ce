"""Which nodes may hold no worker group, and how the groups there leave them: at once.

What runs in a group that leaves goes on in the others, so that the time this takes does not depend
on how long the answers are. While no other group serves, the groups stay until one does, which is
started elsewhere first; no request waits for a start that may fail.
"""

from collections.abc import Mapping

from cluster.group_instructions import Instruction
from cluster.groups import WorkerGroup
from cluster.scaling import Scaling

RETRY_S = 10.0
"""Between attempts to start a group elsewhere, while nothing else can take over."""


class NodeDrains:
    """Drives the groups' state machines; the engine follows what they ask for."""

    def __init__(
        self, groups: Mapping[int, WorkerGroup], scaling: Scaling, nodes: set[str]
    ) -> None:
        """
        Args:
            groups: the engine's.
            nodes: that are drained, by host name or address; the same set as `scaling` has.
        """
        self._groups, self._scaling, self._nodes = groups, scaling, nodes
        self._left: dict[int, tuple[int, str]] = {}
        """By group that has left and perhaps still has processes: its epoch, and the node."""
        self._try_at: float | None = None
        """When another group is started elsewhere, for those that cannot leave yet."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """That take no groups."""
        return tuple(sorted(self._nodes))

    @property
    def next_deadline(self) -> float | None:
        return self._try_at

    def drain(self, node: str, now: float) -> list[Instruction]:
        """Let no group be on this node."""
        self._nodes.add(node)
        return self.keep_time(now)

    def undo(self, node: str, now: float) -> list[Instruction]:
        """Groups may start there again; those that could start nowhere else do so."""
        self._nodes.discard(node)
        wanted = [group for group in self._groups.values() if group.is_wanted]
        return self._scaling.fill(len(wanted), now)

    def num_leaving(self, node: str) -> int:
        """Groups that have processes on this node."""
        there = sum(self._is_open(group) and group.is_on({node}) for group in self._groups.values())
        return there + sum(
            self._groups[number].state == "retiring" and self._groups[number].epoch == epoch
            for number, (epoch, its_node) in self._left.items()
            if its_node == node
        )

    def waits_for(self, node: str) -> str:
        """What has to be before the groups of this node can leave; empty: nothing."""
        if self._try_at is None:
            return ""
        elsewhere = [group for group in self._groups.values() if not group.is_on({node})]
        why = next((f"; the last try: {group.message}" for group in elsewhere if group.message), "")
        return f"a group has to serve on another node, and none does yet{why}"

    def keep_time(self, now: float) -> list[Instruction]:
        """Take groups off drained nodes, also those that have come since."""
        leaving = [
            group
            for group in self._groups.values()
            if self._nodes and self._is_open(group) and group.is_on(self._nodes)
        ]
        if not leaving:
            self._try_at = None
            return []
        staying = [
            group for group in self._groups.values() if group.is_wanted and group not in leaving
        ]
        can_take_over = any(group.state == "ready" for group in staying)
        found: list[Instruction] = []
        for group in leaving:
            if can_take_over or group.state not in ("ready", "draining"):
                node = next(node for node in self._nodes if group.is_on({node}))
                self._left[group.group] = group.epoch, node
                found += group.retire()
        if can_take_over:
            self._try_at = None
            found += self._scaling.fill(len(staying), now)
        elif self._try_at is None or now >= self._try_at:
            self._try_at = now + RETRY_S
            found += self._scaling.fill(len(staying), now)
        return found

    @staticmethod
    def _is_open(group: WorkerGroup) -> bool:
        return group.state in ("starting", "sizing", "ready", "draining")
