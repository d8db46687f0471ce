"""Which group gets a request: the one that would have it going soonest."""

from collections.abc import Iterable

from scheduler.group import Group
from scheduler.sequences import Sequence


def best_group(groups: Iterable[Group], sequence: Sequence) -> Group | None:
    """The group with the fewest tokens to compute before and for the sequence.

    Counts what its running sequences would compute next and what the sequence would have to
    compute itself after a prefix hit, so a hit wins unless its group is busier by more than
    the hit saves. Groups without a free slot, with a pool that could never hold the sequence,
    or about to leave, do not count. Ties go to the lowest group id. None: no group has room now.
    """
    best: Group | None = None
    best_cost = (0, 0)
    for group in groups:
        if group.is_draining or group.running.num_free == 0 or sequence.limit > group.max_len:
            continue
        cached = len(group.match(sequence)) * group.block_size
        cost = (group.load + len(sequence.tokens) - cached, group.group_id)
        if best is None or cost < best_cost:
            best, best_cost = group, cost
    return best
