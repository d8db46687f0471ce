"""The column types of messages, and how they look on the wire.

A column is a one-dimensional numpy array. On the wire it is its raw little-endian
buffer (MessagePack `bin`), so its length is the buffer's length over the item size.
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Int32Array: TypeAlias = npt.NDArray[np.int32]
Uint8Array: TypeAlias = npt.NDArray[np.uint8]
Float32Array: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
Int64Array: TypeAlias = npt.NDArray[np.int64]
"""Not on the wire."""
IndexArray: TypeAlias = npt.NDArray[np.intp]
"""Rows of columns, not on the wire: numpy reads and stores through int32 at half the speed."""
Float64Array: TypeAlias = npt.NDArray[np.float64]
"""Not on the wire."""

_WIRE_DTYPES: dict[object, np.dtype[Any]] = {
    Int32Array: np.dtype("<i4"),
    Uint8Array: np.dtype("u1"),
    Float32Array: np.dtype("<f4"),
    BoolArray: np.dtype("?"),
}

_SENT_DTYPES = frozenset(_WIRE_DTYPES.values())


def int32(values: object) -> Int32Array:
    """The values as a column of int32."""
    return np.asarray(values, dtype=np.int32)


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array


NO_INT32: Int32Array = _read_only(np.empty(0, dtype=np.int32))
NO_INDEX: IndexArray = _read_only(np.empty(0, dtype=np.intp))
NO_UINT8: Uint8Array = _read_only(np.empty(0, dtype=np.uint8))
NO_FLOAT32: Float32Array = _read_only(np.empty(0, dtype=np.float32))
NO_BOOL: BoolArray = _read_only(np.empty(0, dtype=np.bool_))


def encode_column(value: object) -> memoryview | bytes:
    """msgspec `enc_hook`: a column as its raw little-endian buffer.

    Raises:
        NotImplementedError: the value is not one of the four column types.
    """
    if isinstance(value, np.ndarray) and value.dtype in _SENT_DTYPES and value.ndim == 1:
        return value.tobytes()
    raise NotImplementedError(f"cannot put a {type(value).__name__} on the wire")


def decode_column(kind: type, value: object) -> npt.NDArray[Any]:
    """msgspec `dec_hook`: a read-only view of the received buffer.

    Raises:
        ValueError: the buffer's length is not a multiple of the item size.
        TypeError: the value is not a buffer.
    """
    dtype = _WIRE_DTYPES.get(kind)
    if dtype is None:
        raise NotImplementedError(f"no wire form for {kind}")
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"a column must arrive as binary data, got {type(value).__name__}")
    return np.frombuffer(value, dtype=dtype)
