import numpy as np
import pytest

from kvcache.cache import KVCache
from kvcache.checks import check_cache
from kvcache.errors import OutOfBlocks
from kvcache.keys import chain_keys, root_key


def make_cache(num_blocks: int = 8, **settings: bool) -> KVCache:
    return KVCache(
        num_blocks=num_blocks, block_size=4, num_slots=4, max_blocks_per_slot=8, **settings
    )


def keys(num_blocks: int) -> list[bytes]:
    return chain_keys(root_key(None), np.arange(num_blocks * 4, dtype=np.int32), 4)


def test_a_slot_holds_its_cached_blocks_and_then_new_ones() -> None:
    cache = make_cache()
    first = cache.admit(0, [], 12)
    cache.commit(0, 0, keys(3))

    second = cache.admit(1, cache.match(keys(2)), 13)

    assert second[:2] == first[:2]
    assert not set(second[2:]) & set(first)
    assert cache.num_idle == 8 - 3 - 2
    check_cache(cache)


def test_admission_without_room_takes_nothing() -> None:
    cache = make_cache(4)
    cache.admit(0, [], 8)
    cache.commit(0, 0, keys(2))

    with pytest.raises(OutOfBlocks):
        cache.admit(1, cache.match(keys(2)), 20)

    check_cache(cache)
    assert cache.num_idle == 2


def test_a_hit_on_idle_blocks_counts_against_the_idle_ones() -> None:
    cache = make_cache()
    cache.admit(0, [], 8)
    cache.commit(0, 0, keys(2))
    assert cache.num_needed(cache.match(keys(2)), 9) == 1
    cache.release(0, None)

    assert cache.num_needed(cache.match(keys(2)), 9) == 3


def test_released_blocks_idle_only_when_the_last_plan_that_may_write_them_is_answered() -> None:
    cache = make_cache(2)
    cache.admit(0, [], 8)
    cache.release(0, fence=5)
    check_cache(cache)
    cache.answered(4)
    assert (cache.num_idle, cache.num_limbo) == (0, 2)

    cache.answered(5)

    assert (cache.num_idle, cache.num_limbo) == (2, 0)
    check_cache(cache)


def test_a_prefix_survives_its_request_until_its_blocks_are_needed() -> None:
    cache = make_cache(4)
    cache.admit(0, [], 8)
    cache.commit(0, 0, keys(2))
    cache.release(0, None)
    cache.admit(1, [], 8)
    assert len(cache.match(keys(2))) == 2

    cache.extend(np.array([1], dtype=np.int32))

    assert len(cache.match(keys(2))) == 1, "the tail goes first"
    check_cache(cache)


def test_without_prefix_reuse_nothing_matches() -> None:
    cache = make_cache(reuses_prefixes=False)
    cache.admit(0, [], 8)
    cache.commit(0, 0, keys(2))

    assert cache.match(keys(2)) == []
