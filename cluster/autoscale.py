"""How many worker groups the load asks for: a rule without clock or sockets, time as an argument.

It follows two things: how long the first waiting request has waited, and the share of places
(slots, or blocks if those are scarcer) that sequences take. It moves by one group at a time, and
only when the reason has lasted: soon upwards, slowly downwards, and not while a group comes or
goes, so that a load which swings around a border does not start and stop processes with it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalePolicy:
    """When a group comes, and when one goes."""

    min_groups: int
    max_groups: int
    queue_s: float = 1.0
    """A request that waits longer asks for another group. Less: more groups, shorter queues."""
    busy_share: float = 0.9
    """So does a larger share of places taken: preemptions and queues are next."""
    idle_share: float = 0.6
    """A group may go if the others would have a smaller share taken without it."""
    up_after_s: float = 5.0
    """How long a reason to add a group must last."""
    down_after_s: float = 120.0
    """How long a reason to take one away must last. Less: fewer idle groups, more starts."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_groups <= self.max_groups:
            raise ValueError(
                f"min_groups={self.min_groups} and max_groups={self.max_groups}: the first must be "
                "at least 1, the second at least the first"
            )
        if not 0 < self.idle_share < self.busy_share <= 1:
            raise ValueError(
                f"idle_share={self.idle_share:g} must be below busy_share={self.busy_share:g}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The cluster at one moment."""

    num_ready: int
    """Groups that take plans, those that leave not included"""
    is_changing: bool
    """Whether a group is starting or leaving."""
    queue_s: float
    """How long the first waiting request has waited; 0: none waits."""
    taken_share: float
    """Of the ready groups' slots or blocks, whichever is more, from 0 to 1."""


class Autoscaler:
    """Remembers since when there is a reason to change."""

    def __init__(self, policy: AutoscalePolicy) -> None:
        self._policy = policy
        self._busy_since: float | None = None
        self._idle_since: float | None = None

    def wanted(self, num_groups: int, load: Load, now: float) -> int:
        """How many groups there should be, of `num_groups` that are wanted so far."""
        policy = self._policy
        within = min(max(num_groups, policy.min_groups), policy.max_groups)
        if within != num_groups:
            return within
        self._busy_since = _since(self._busy_since, self._is_busy(load), now)
        self._idle_since = _since(self._idle_since, self._is_idle(load), now)
        if load.is_changing:
            return num_groups
        if _has_lasted(self._busy_since, policy.up_after_s, now):
            self._busy_since = now
            return min(num_groups + 1, policy.max_groups)
        if _has_lasted(self._idle_since, policy.down_after_s, now):
            self._idle_since = now
            return max(num_groups - 1, policy.min_groups)
        return num_groups

    def _is_busy(self, load: Load) -> bool:
        return load.queue_s > self._policy.queue_s or load.taken_share > self._policy.busy_share

    def _is_idle(self, load: Load) -> bool:
        if load.num_ready < 2 or load.queue_s > 0:
            return False
        without = load.taken_share * load.num_ready / (load.num_ready - 1)
        return without < self._policy.idle_share


def _since(since: float | None, holds: bool, now: float) -> float | None:
    if not holds:
        return None
    return now if since is None else since


def _has_lasted(since: float | None, wanted_s: float, now: float) -> bool:
    return since is not None and now - since >= wanted_s
