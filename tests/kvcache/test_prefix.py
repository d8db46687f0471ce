import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvcache.prefix import PrefixIndex, chain_keys, next_key, root_key

TOKENS = np.arange(100, 148, dtype=np.int32)


def keys_of(tokens: list[int], salt: str | None = None, block_size: int = 4) -> list[bytes]:
    return chain_keys(root_key(salt), np.array(tokens, dtype=np.int32), block_size)


def test_only_full_blocks_have_keys() -> None:
    assert [len(keys_of(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=8, max_size=24),
    st.integers(0, 23),
    st.integers(0, 2**31 - 1),
)
def test_a_key_stands_for_every_token_up_to_its_end(tokens: list[int], at: int, new: int) -> None:
    at %= len(tokens)
    other = [*tokens[:at], new, *tokens[at + 1 :]]

    for index, (one, two) in enumerate(zip(keys_of(tokens), keys_of(other), strict=True)):
        differs = tokens[: (index + 1) * 4] != other[: (index + 1) * 4]
        assert (one != two) == differs


def test_a_chain_can_be_continued_block_by_block() -> None:
    whole = chain_keys(root_key(None), TOKENS, 16)
    first = chain_keys(root_key(None), TOKENS[:16], 16)
    rest = chain_keys(first[-1], TOKENS[16:], 16)

    assert whole == [*first, *rest]
    assert next_key(first[-1], TOKENS[16:32].tobytes()) == whole[1]


def test_salts_and_no_salt_never_share_a_key() -> None:
    roots = [root_key(salt) for salt in (None, "", "a", "b", "salt:a")]

    assert len(set(roots)) == len(roots)


def test_keys_are_the_same_in_every_process_and_long_enough_that_nobody_finds_a_collision() -> None:
    program = (
        "import numpy as np; from kvcache.prefix import chain_keys, root_key; "
        "print(chain_keys(root_key('s'), np.arange(16, dtype=np.int32), 16)[0].hex())"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.strip()

    assert printed == chain_keys(root_key("s"), np.arange(16, dtype=np.int32), 16)[0].hex()
    assert len(printed) == 32


def test_the_longest_known_prefix_is_found_and_a_hole_ends_it() -> None:
    index = PrefixIndex()
    keys = keys_of(list(range(16)))
    index.add([keys[0], keys[1], keys[3]], [5, 6, 8])

    assert index.longest_match(keys) == [5, 6]


def test_the_first_block_of_a_key_stays_and_a_forgotten_block_is_not_found() -> None:
    index = PrefixIndex()
    key = keys_of([1, 2, 3, 4])
    index.add(key, [5])
    index.add(key, [6])
    assert index.longest_match(key) == [5]
    assert not index.holds(6)

    index.forget([5, 6])

    assert index.longest_match(key) == []
    assert len(index) == 0
