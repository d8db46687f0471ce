import numpy as np

from kvcache.keys import chain_keys, root_key
from kvcache.prefix import PrefixIndex


def keys_of(tokens: list[int]) -> list[bytes]:
    return chain_keys(root_key(None), np.array(tokens, dtype=np.int32), 4)


def test_the_longest_known_prefix_is_found_and_a_hole_ends_it() -> None:
    index = PrefixIndex(16)
    keys = keys_of(list(range(16)))
    index.add([keys[0], keys[1], keys[3]], [5, 6, 8])

    assert index.longest_match(keys) == [5, 6]


def test_the_first_block_of_a_key_stays_and_a_forgotten_block_is_not_found() -> None:
    index = PrefixIndex(16)
    key = keys_of([1, 2, 3, 4])
    index.add(key, [5])
    index.add(key, [6])
    assert index.longest_match(key) == [5]
    assert not index.holds(6)

    index.forget([5, 6])

    assert index.longest_match(key) == []
    assert len(index) == 0


def test_of_equal_keys_that_come_together_the_first_ones_block_counts() -> None:
    index = PrefixIndex(16)
    first, second = keys_of(list(range(8)))
    index.add([first, second, first], [1, 2, 3])

    assert index.longest_match([first, second]) == [1, 2]
    assert not index.holds(3)
    index.forget([3])
    assert index.longest_match([first]) == [1]
