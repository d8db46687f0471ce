"""Keys of full blocks, which stand for every token from the start of a sequence to their end.

BLAKE2b (RFC 7693, 128 bits) over the key of the block before and the block's tokens. So equal
keys mean equal prefixes, nobody can craft a collision (cases: a weak hash serves another
prompt's cache), and every process gets the same keys. The first block's parent is the hash of
the request's salt: other salts never match.

Computed by a native library that setting up builds (ADR 0020), else by `hashlib`, whose keys are
the same bytes and take three times as long.
"""

import ctypes
import sys
from functools import cache
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

KEY_BYTES = 16
KEY = np.dtype(f"V{KEY_BYTES}")
"""Of columns of keys. Their `tolist` gives `bytes`."""

KeyArray = npt.NDArray[np.void]

_VERSION = 2


def root_key(salt: str | None) -> bytes:
    """The parent of a sequence's first block; different for each salt and for no salt."""
    text = b"stoker:" if salt is None else b"stoker:salt:" + salt.encode()
    return blake2b(text, digest_size=KEY_BYTES).digest()


def chain_keys(parent: bytes, tokens: npt.NDArray[np.int32], block_size: int) -> list[bytes]:
    """Keys of the full blocks of `tokens`, which follow the block with the key `parent`.

    Cost: 0.2 microseconds per block of 16 tokens.
    """
    num_blocks = len(tokens) // block_size
    native = native_library()
    blocks = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    if native is None:
        return _chain_keys(parent, blocks, num_blocks, block_size * 4)
    keys: KeyArray = np.empty(num_blocks, dtype=KEY)
    native.stoker_chain_keys(parent, blocks, num_blocks, block_size * 4, keys.ctypes.data)
    found: list[bytes] = keys.tolist()
    return found


def next_keys(
    parents: KeyArray,
    tokens: npt.NDArray[np.int32],
    rows: npt.NDArray[np.intp],
    ends: npt.NDArray[np.int32],
    block_size: int,
) -> KeyArray:
    """Keys of N full blocks of different sequences, each with a parent of its own.

    Block i is the `block_size` tokens of row `rows[i]` before position `ends[i]`.

    Shapes: parents, rows, ends and the result are [N], tokens is [num_rows, width].
    """
    native = native_library()
    if native is None:
        blocks = tokens[rows[:, None], ends[:, None] + np.arange(-block_size, 0)]
        pairs = zip(parents.tolist(), blocks.astype("<i4"), strict=True)
        keys = [_key(parent, block.tobytes()) for parent, block in pairs]
        return np.frombuffer(b"".join(keys), dtype=KEY)
    assert tokens.flags.c_contiguous
    begins = rows * tokens.shape[1] + (ends - block_size)
    found: KeyArray = np.empty(len(rows), dtype=KEY)
    native.stoker_next_keys(
        *(parents.tobytes(), tokens.ctypes.data, begins.tobytes(), len(rows), block_size),
        found.ctypes.data,
    )
    return found


def _key(parent: bytes, block: bytes) -> bytes:
    return blake2b(parent + block, digest_size=KEY_BYTES).digest()


def _chain_keys(parent: bytes, blocks: bytes, num_blocks: int, block_bytes: int) -> list[bytes]:
    keys = []
    for start in range(0, num_blocks * block_bytes, block_bytes):
        parent = _key(parent, blocks[start : start + block_bytes])
        keys.append(parent)
    return keys


@cache
def native_library() -> ctypes.CDLL | None:
    """The newest build beside this package's C++; None: there is none that does here."""
    builds = sorted(
        (Path(__file__).parent / "native").glob("keys*.so"), key=lambda path: path.stat().st_mtime
    )
    if not builds or sys.byteorder != "little":
        return None
    try:
        native = ctypes.CDLL(str(builds[-1]))
        if native.stoker_keys_version() != _VERSION:
            return None
    except (OSError, AttributeError):
        return None
    text, count, address = ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p
    native.stoker_chain_keys.argtypes = (text, text, count, count, address)
    native.stoker_next_keys.argtypes = (text, address, text, count, count, address)
    native.stoker_chain_keys.restype = native.stoker_next_keys.restype = None
    return native
