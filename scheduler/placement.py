"""Which group gets which waiting request: the one that would have it going soonest."""

import heapq
from collections.abc import Iterable

from scheduler.group import Group
from scheduler.sequences import Sequence


class Placement:
    """Deals the waiting sequences to the groups, in their order, while one group is planned.

    What has been dealt to a group counts as its load from then on, whether it has taken it yet or
    not: so the sequences behind go to others, and a group that is planned takes its whole part of
    the queue at once. It is dealt anew for each plan. Groups without a free slot, or about to
    leave, get nothing.

    A sequence costs a look-up of its first block in every group, and more only where it is found.
    """

    def __init__(self, groups: Iterable[Group]) -> None:
        self._groups = {
            group.group_id: group
            for group in groups
            if group.running.num_free and not group.is_draining
        }
        self._tokens = {number: group.backlog for number, group in self._groups.items()}
        """To compute before anything else that is dealt to the group."""
        self._num_free = {number: group.running.num_free for number, group in self._groups.items()}
        self._held = [(number, group.cache.held_keys) for number, group in self._groups.items()]
        self._idlest = [(tokens, number) for number, tokens in self._tokens.items()]
        """A heap; what is no longer so is put right when it comes to the top."""
        heapq.heapify(self._idlest)

    def deal(self, sequence: Sequence) -> Group | None:
        """The group with the fewest tokens to compute before and for the sequence.

        Counts what its running sequences have not computed yet and what the sequence would have
        to compute itself after a prefix hit, so a hit wins unless its group is busier by more
        than the hit saves. Groups with a pool that could never hold the sequence do not count.
        Ties go to the lowest group id. None: no group has room now.
        """
        costs = self._costs_after_hits(sequence)
        if (idlest := self._idlest_for(sequence)) is not None:
            costs.append((self._tokens[idlest] + len(sequence.tokens), idlest))
        if not costs:
            return None
        cost, number = min(costs)
        self._tokens[number] = cost
        self._num_free[number] -= 1
        return self._groups[number]

    def _costs_after_hits(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Of the groups that hold the beginning of the sequence, and their numbers."""
        if not sequence.keys:
            return []
        first = sequence.keys[0]
        costs = []
        for number in [number for number, held in self._held if first in held]:
            group = self._groups[number]
            if self._num_free[number] and sequence.limit <= group.max_len:
                left = len(sequence.tokens) - len(group.match(sequence)) * group.block_size
                costs.append((self._tokens[number] + left, number))
        return costs

    def _idlest_for(self, sequence: Sequence) -> int | None:
        """The number of the group with the fewest tokens of others before the sequence."""
        heap = self._idlest
        while heap:
            tokens, number = heap[0]
            if not self._num_free[number]:
                heapq.heappop(heap)
            elif tokens != self._tokens[number]:
                heapq.heapreplace(heap, (self._tokens[number], number))
            elif sequence.limit <= self._groups[number].max_len:
                return number
            else:
                break
        fitting = [
            (tokens, number)
            for number, tokens in self._tokens.items()
            if self._num_free[number] and sequence.limit <= self._groups[number].max_len
        ]
        return min(fitting)[1] if fitting else None
