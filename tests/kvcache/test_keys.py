import subprocess
import sys
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache import keys
from kvcache.keys import KEY, chain_keys, next_keys, root_key

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


def hashed(parent: bytes, block: bytes) -> bytes:
    return blake2b(parent + block, digest_size=16).digest()


@pytest.fixture(params=["native", "hashlib"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    assert keys.native_library() is not None, "set-up has not built kvcache/native"
    if request.param == "hashlib":
        monkeypatch.setattr(keys, "native_library", lambda: None)


@pytest.mark.parametrize("block_size", [1, 4, 16, 28, 29, 32, 60, 61, 128])
@pytest.mark.usefixtures("implementation")
def test_keys_are_blake2b_of_the_parent_and_the_tokens(block_size: int) -> None:
    tokens = np.random.default_rng(block_size).integers(0, 2**31, 7 * block_size, dtype=np.int32)
    blocks = tokens.reshape(7, block_size)
    parents = [hashed(b"parent", bytes([n])) for n in range(7)]

    expected, parent = [], parents[0]
    for block in blocks:
        parent = hashed(parent, block.astype("<i4").tobytes())
        expected.append(parent)
    each = [hashed(p, b.astype("<i4").tobytes()) for p, b in zip(parents, blocks, strict=True)]

    assert chain_keys(parents[0], tokens, block_size) == expected
    found = next_keys(
        np.frombuffer(b"".join(parents), dtype=KEY),
        np.concatenate([tokens, tokens]).reshape(2, -1),
        np.array([0, 1, 0, 1, 0, 1, 0]),
        np.arange(1, 8, dtype=np.int32) * block_size,
        block_size,
    )
    assert found.tolist() == each


@pytest.mark.usefixtures("implementation")
def test_tokens_need_not_lie_side_by_side() -> None:
    spread = np.zeros((64, 3), dtype=np.int32)
    spread[:, 1] = np.arange(64)

    assert chain_keys(root_key(None), spread[:, 1], 16) == chain_keys(
        root_key(None), np.arange(64, dtype=np.int32), 16
    )


def test_salts_and_no_salt_never_share_a_key() -> None:
    roots = [root_key(salt) for salt in (None, "", "a", "b", "salt:a")]

    assert len(set(roots)) == len(roots)


def test_keys_are_the_same_in_every_process_and_long_enough_that_nobody_finds_a_collision() -> None:
    program = (
        "import numpy as np; from kvcache.keys import chain_keys, root_key; "
        "print(chain_keys(root_key('s'), np.arange(16, dtype=np.int32), 16)[0].hex())"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.strip()

    assert printed == chain_keys(root_key("s"), np.arange(16, dtype=np.int32), 16)[0].hex()
    assert len(printed) == 32
