"""The structs of the native library (kernels/kernels.h, kernels/program.cpp), which says what
their fields mean. The order of fields is what counts; `worker.ops.native.team` compares sizes."""

import ctypes
from enum import IntEnum

from torch import Tensor

_Pointer = ctypes.c_void_p
_Long = ctypes.c_int64
_Int = ctypes.c_int32


class Format(IntEnum):
    """Of weights and K/V."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    INT8 = 3


class Rows(IntEnum):
    """How many rows an operation has."""

    TOKENS = 0
    WANTED = 1


class Code(IntEnum):
    """Which operation."""

    LINEAR = 0
    EMBEDDING = 1
    TAKE_ROWS = 2
    NORM = 3
    ACTIVATION = 4
    ROTATE = 5
    ATTENTION = 6
    ALL_REDUCE = 7


class Batch(ctypes.Structure):
    _fields_ = (
        ("num_tokens", _Long),
        ("num_slices", _Long),
        ("num_wanted", _Long),
        ("block_size", _Long),
        ("table_width", _Long),
        ("token_ids", _Pointer),
        ("positions", _Pointer),
        ("cells", _Pointer),
        ("slice_offsets", _Pointer),
        ("block_tables", _Pointer),
        ("context_lens", _Pointer),
        ("wanted", _Pointer),
    )


class LinearArgs(ctypes.Structure):
    _fields_ = (
        ("x", _Pointer),
        ("weight", _Pointer),
        ("bias", _Pointer),
        ("out", _Pointer),
        ("in_features", _Long),
        ("out_features", _Long),
        ("format", _Int),
        ("rows", _Int),
        ("scratch", _Pointer),
    )


class EmbeddingArgs(ctypes.Structure):
    _fields_ = (
        ("table", _Pointer),
        ("out", _Pointer),
        ("first_id", _Long),
        ("num_ids", _Long),
        ("width", _Long),
        ("format", _Int),
        ("is_packed", _Int),
    )


class TakeRowsArgs(ctypes.Structure):
    _fields_ = (("x", _Pointer), ("out", _Pointer), ("width", _Long))


class NormArgs(ctypes.Structure):
    _fields_ = (
        ("x", _Pointer),
        ("residual", _Pointer),
        ("weight", _Pointer),
        ("out", _Pointer),
        ("width", _Long),
        ("eps", ctypes.c_float),
        ("rows", _Int),
    )


class ActivationArgs(ctypes.Structure):
    _fields_ = (("gate_up", _Pointer), ("out", _Pointer), ("columns", _Long), ("rows", _Int))


class HeadsShape(ctypes.Structure):
    _fields_ = (
        ("num_heads", _Long),
        ("num_kv_heads", _Long),
        ("head_dim", _Long),
        ("head_bytes", _Long),
        ("num_blocks", _Long),
        ("kv_format", _Int),
        ("scale", ctypes.c_float),
    )


class RotateArgs(ctypes.Structure):
    _fields_ = (
        ("qkv", _Pointer),
        ("kv", _Pointer),
        ("cos_sin", _Pointer),
        ("q_norm", _Pointer),
        ("k_norm", _Pointer),
        ("eps", ctypes.c_float),
        ("shape", HeadsShape),
    )


class AttentionArgs(ctypes.Structure):
    _fields_ = (
        ("q", _Pointer),
        ("kv", _Pointer),
        ("out", _Pointer),
        ("q_stride", _Long),
        ("window", _Long),
        ("shape", HeadsShape),
    )


class AllReduceArgs(ctypes.Structure):
    _fields_ = (
        ("reduce", _Pointer),
        ("group", _Pointer),
        ("data", _Pointer),
        ("width", _Long),
        ("rows", _Int),
    )


Args = (
    LinearArgs
    | EmbeddingArgs
    | TakeRowsArgs
    | NormArgs
    | ActivationArgs
    | RotateArgs
    | AttentionArgs
    | AllReduceArgs
)


class _AnyArgs(ctypes.Union):
    _fields_ = (
        ("linear", LinearArgs),
        ("embedding", EmbeddingArgs),
        ("take_rows", TakeRowsArgs),
        ("norm", NormArgs),
        ("activation", ActivationArgs),
        ("rotate", RotateArgs),
        ("attention", AttentionArgs),
        ("all_reduce", AllReduceArgs),
    )


class Operation(ctypes.Structure):
    _fields_ = (("code", _Int), ("args", _AnyArgs))


class DrawArgs(ctypes.Structure):
    _fields_ = (
        ("logits", _Pointer),
        ("num_rows", _Long),
        ("vocab_size", _Long),
        ("stride", _Long),
        ("temperature", _Pointer),
        ("top_k", _Pointer),
        ("top_p", _Pointer),
        ("min_p", _Pointer),
        ("seed", _Pointer),
        ("position", _Pointer),
        ("token", _Pointer),
        ("best", _Pointer),
    )


def operation(code: Code, args: Args) -> Operation:
    """One entry of a list of operations."""
    return Operation(code, _AnyArgs(**{code.name.lower(): args}))


def pointer(tensor: Tensor | None) -> int | None:
    """Where a dense tensor of the host begins; the caller keeps it alive."""
    return None if tensor is None else tensor.data_ptr()
