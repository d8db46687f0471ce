"""Lets Triton kernels run without a GPU: import this before any module with kernels.

With a GPU the kernels are compiled and run there, and this module only says so.

Triton decides when `@triton.jit` decorates a function whether it will be interpreted, its
own library's functions included; if another test has imported Triton before (transformers
does), those are turned here. And its interpreter (3.9.0) is mended for bfloat16: it cuts where
a GPU rounds to the nearest, and multiplies matrices as if their bits were integers.
"""

import os
import sys

import numpy as np
import numpy.typing as npt
import torch

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    for name, module in list(sys.modules.items()):
        if name.startswith("triton.language"):
            for key, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    setattr(module, key, interpreter.InterpretedFunction(value.fn))

    builder = interpreter.interpreter_builder
    multiply, convert = builder.create_dot, interpreter._convert_float

    def create_dot(left: object, right: object, *others: object) -> object:
        if left.dtype.scalar == tl.bfloat16:
            left, right = builder.cast_impl(left, tl.float32), builder.cast_impl(right, tl.float32)
        return multiply(left, right, *others)

    def convert_float(values: object, source: object, target: object, rounding: object) -> object:
        if (source, target) == (tl.float32, tl.bfloat16):
            return rounded_to_bfloat16(values)
        return convert(values, source, target, rounding)

    builder.create_dot = create_dot
    interpreter._convert_float = convert_float


def rounded_to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bfloat16, of two as near the even one."""
    tensor = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    return tensor.view(torch.uint16).numpy()


if not HAS_GPU:
    _interpret()
