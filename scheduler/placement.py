"""Which group gets which waiting request: the one that would have it going soonest."""

from collections.abc import Iterable

from scheduler.group import Group
from scheduler.sequences import Sequence


class Placement:
    """Deals the waiting sequences to the groups, in their order, while one group is planned.

    What has been dealt to a group counts as its load from then on, whether it has taken it yet or
    not: so the sequences behind go to others, and a group that is planned takes its whole part of
    the queue at once. It is dealt anew for each plan.
    """

    def __init__(self, groups: Iterable[Group]) -> None:
        self._groups = list(groups)
        self._tokens = {group.group_id: group.backlog for group in self._groups}
        """To compute before anything else that is dealt."""
        self._num_free = {group.group_id: group.running.num_free for group in self._groups}

    def deal(self, sequence: Sequence) -> Group | None:
        """The group with the fewest tokens to compute before and for the sequence.

        Counts what its running sequences have not computed yet and what the sequence would have
        to compute itself after a prefix hit, so a hit wins unless its group is busier by more
        than the hit saves. Groups without a free slot, with a pool that could never hold the
        sequence, or about to leave, do not count. Ties go to the lowest group id. None: no group
        has room now.
        """
        best: Group | None = None
        best_cost = (0, 0)
        for group in self._groups:
            number = group.group_id
            if group.is_draining or not self._num_free[number] or sequence.limit > group.max_len:
                continue
            cached = len(group.match(sequence)) * group.block_size
            cost = (self._tokens[number] + len(sequence.tokens) - cached, number)
            if best is None or cost < best_cost:
                best, best_cost = group, cost
        if best is not None:
            self._tokens[best.group_id] = best_cost[0]
            self._num_free[best.group_id] -= 1
        return best
