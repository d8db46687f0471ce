"""Which set of operations a rank uses. Imports only the set that is chosen."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import cast

from worker.ops.draws import Draw
from worker.ops.table import Operations

_SETS = {
    "reference": ("worker.ops.reference", "ReferenceOperations"),
    "cpu": ("worker.ops.cpu", "CpuOperations"),
    "cuda": ("worker.ops.cuda", "CudaOperations"),
}


def make_operations(
    name: str, device: str, num_threads: int = 1, quantization: str = "none"
) -> Operations:
    """The set of this name; `auto` is the fast one of the device.

    Args:
        num_threads: that the `cpu` set computes with, the caller's own among them.
        quantization: of linear layers' weights; int8 is for the `cpu` set only.

    Raises:
        ImportError: the set's own dependency (triton for `cuda`) is not installed.
    """
    chosen = device if name == "auto" else name
    module, kind = _SETS[chosen]
    build = cast("Callable[..., Operations]", getattr(importlib.import_module(module), kind))
    if chosen == "cpu":
        return build(num_threads, is_int8=quantization == "int8")
    assert quantization == "none", f"{chosen} operations do not quantize"
    return build()


def find_draw(ops: Operations) -> Draw | None:
    """The sampler's kernel that belongs to a set; None: torch draws."""
    if ops.name == "cpu":
        from worker.ops.cpu import CpuOperations
        from worker.ops.native.sampling import draw as draw_natively

        assert isinstance(ops, CpuOperations)
        return partial(draw_natively, ops.team)
    if ops.name == "cuda":
        from worker.ops.triton.sampling import draw  # loads triton

        return draw
    return None
