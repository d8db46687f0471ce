"""Every invariant of the KV cache, checked in full: for tests and a debug switch."""

from collections import Counter

from kvcache.cache import KVCache


def check_cache(cache: KVCache) -> None:
    """Compare each count with what tables and limbo say.

    Raises:
        AssertionError: an invariant does not hold.
    """
    pool, index = cache.pool, cache.index
    held: Counter[int] = Counter()
    for slot in range(len(cache.tables.lengths)):
        row = cache.tables.of(slot).tolist()
        assert len(set(row)) == len(row), f"slot {slot} holds a block twice: {row}"
        held.update(row)
    for _, blocks in cache.limbo():
        held.update(blocks)
    held.update(cache.withheld)
    idle = set(pool.idle())
    assert len(idle) == pool.num_idle, "a block idles twice"
    for block in range(pool.num_blocks):
        assert pool.holders(block) == held[block], (
            f"block {block} has {pool.holders(block)} holders, tables and limbo say {held[block]}"
        )
        assert (block in idle) == (held[block] == 0), f"block {block} idle but held, or not"
    for block in pool.idle()[: pool.num_blank]:
        assert not index.holds(block), f"block {block} is reusable, but among those that are not"
    num_named = sum(key is not None for key in index._key_by_block)
    assert len(index._block_by_key) == num_named, "index maps differ in size"
    for key, block in index._block_by_key.items():
        assert index._key_by_block[block] == key, f"block {block} has two keys"
    assert cache.num_limbo == sum(len(blocks) for _, blocks in cache.limbo())
