"""Which blocks hold the K/V of which prefixes.

A full block is named by a key that stands for every token from the start of the sequence
to the block's end: BLAKE2b (RFC 7693, 128 bits) over the key of the block before and the
block's tokens. So equal keys mean equal prefixes, nobody can craft a collision
(cases: a weak hash serves another prompt's cache), and every process gets the same keys.
The first block's parent is the hash of the request's salt: other salts never match.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

_KEY_BYTES = 16


def root_key(salt: str | None) -> bytes:
    """The parent of a sequence's first block; different for each salt and for no salt."""
    text = b"stoker:" if salt is None else b"stoker:salt:" + salt.encode()
    return blake2b(text, digest_size=_KEY_BYTES).digest()


def chain_keys(parent: bytes, tokens: npt.NDArray[np.int32], block_size: int) -> list[bytes]:
    """Keys of the full blocks of `tokens`, which follow the block named `parent`.

    Cost: about a microsecond per block.
    """
    width = block_size * 4
    buffer = memoryview(np.ascontiguousarray(tokens, dtype="<i4").tobytes())
    keys = []
    for start in range(0, len(tokens) // block_size * width, width):
        digest = blake2b(parent, digest_size=_KEY_BYTES)
        digest.update(buffer[start : start + width])
        parent = digest.digest()
        keys.append(parent)
    return keys


class PrefixIndex:
    """Keys of the blocks whose content can be reused, one block per key."""

    def __init__(self) -> None:
        self._block_by_key: dict[bytes, int] = {}
        self._key_by_block: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_by_key)

    def holds(self, block: int) -> bool:
        """Whether the block's content can be found by a key."""
        return block in self._key_by_block

    def add(self, key: bytes, block: int) -> bool:
        """Remember that `block` holds the prefix `key`; False if another block does already."""
        if self._block_by_key.setdefault(key, block) != block:
            return False
        self._key_by_block[block] = key
        return True

    def forget(self, block: int) -> None:
        """The block is about to be overwritten."""
        key = self._key_by_block.pop(block, None)
        if key is not None:
            del self._block_by_key[key]

    def longest_match(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest prefix of `keys` that is held."""
        blocks = []
        for key in keys:
            block = self._block_by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks
