"""Lets Triton kernels run without a GPU: import this before any module with kernels.

With a GPU the kernels are compiled and run there, and this module only says so.

Triton decides when `@triton.jit` decorates a function whether it will be interpreted, its
own library's functions included; if another test has imported Triton before (transformers
does), those are turned here. And its interpreter (3.9.0) multiplies matrices of bfloat16 as
if their bits were integers, so such operands are widened first.
"""

import os
import sys

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
    multiply = builder.create_dot

    def create_dot(left: object, right: object, *others: object) -> object:
        if left.dtype.scalar == tl.bfloat16:
            left, right = builder.cast_impl(left, tl.float32), builder.cast_impl(right, tl.float32)
        return multiply(left, right, *others)

    builder.create_dot = create_dot


if not HAS_GPU:
    _interpret()
