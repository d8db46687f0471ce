"""Every invariant of the scheduler, checked in full: for tests and a debug switch."""

import numpy as np

from kvcache.checks import check_cache
from scheduler.group import Group
from scheduler.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Compare queue, slots, caches and the map of live requests with one another.

    Raises:
        AssertionError: an invariant does not hold.
    """
    waiting = list(scheduler.waiting)
    assert waiting == sorted(waiting, key=lambda s: s.sort_key), "the queue is out of order"
    assert scheduler.waiting.num_tokens == sum(len(s.tokens) for s in waiting)
    places = [(s.client, s.request.handle) for s in waiting]
    for sequence in waiting:
        assert sequence.group_id is None
        assert sequence.slot == -1
    for group in scheduler.groups.values():
        check_group(group)
        inside = group.running.in_order() + [s for _, s in group.leaving.values()]
        assert all(s.group_id == group.group_id for s in inside)
        places += [(s.client, s.request.handle) for s in inside]
    assert sorted(places) == sorted(scheduler.live), "a live request is nowhere, or twice"
    num_new = sum(not sequence.request.is_continuation for sequence in waiting)
    assert num_new <= scheduler.config.max_waiting_requests + sum(
        scheduler.config.max_num_seqs for _ in range(1 + len(scheduler.groups))
    )


def check_group(group: Group) -> None:
    """Compare the columns of one group with its sequences and its cache."""
    check_cache(group.cache)
    rows = group.running
    order = rows.order
    keys = [rows.at(slot).sort_key for slot in order.tolist()]
    assert keys == sorted(keys), "running sequences are out of order"
    in_use = {slot for slot, s in enumerate(rows.sequences) if s is not None}
    assert in_use == set(order.tolist())
    assert len(in_use) == len(order)
    assert len(in_use) + rows.num_free == len(rows.sequences)
    assert (rows.serial[order] >= 0).all()
    assert (rows.committed[order] <= rows.planned[order]).all(), "a block is named too soon"
    assert (rows.committed[order] % group.block_size == 0).all()
    assert (rows.planned[order] < rows.known[order]).all(), "a token is computed before it exists"
    assert (rows.confirmed[order] <= rows.known[order]).all()
    in_flight = rows.known[order] - rows.confirmed[order]
    most = len(group.unanswered) if group.num_stages == 1 else 1
    assert (in_flight <= most).all(), "more tokens in flight than plans can carry"
    assert (rows.confirmed[order] < rows.limit[order]).all(), "a finished sequence runs"
    lengths = group.cache.tables.lengths
    assert (rows.capacity[order] == lengths[order] * group.block_size).all()
    assert (rows.planned[order] <= rows.capacity[order]).all(), "a slice has no block"
    empty = np.setdiff1d(np.arange(len(rows.sequences)), order)
    assert (lengths[empty] == 0).all(), "an empty slot holds blocks"
    for fence, sequence in group.leaving.values():
        assert group.unanswered, "nobody fetches it"
        assert fence >= group.unanswered[0].step, "nobody fetches it"
        assert sequence.slot == -1
