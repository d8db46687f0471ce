"""Compiles every kernel for a GPU that need not be there, down to machine code.

Run as `python -m tests.worker.ops.compile_kernels 80 CACHE_DIR` (compute capability 8.0);
prints one JSON object per kernel with what its program takes of a multiprocessor. Nothing is
launched: in the place of each launch stands a compilation for the same arguments.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from tests.worker.ops.batches import make_shape, make_step


class AbsentGpu:
    """What Triton asks its driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def resources(cubin: bytes) -> dict[str, int]:
    """Registers per thread, and bytes of stack per thread: what did not fit into registers."""
    from triton.backends import nvidia

    tool = Path(next(iter(nvidia.__path__))) / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found is not None, told
    return {"registers": int(found[1]), "stack": int(found[2])}


def compile_instead_of_launching() -> None:
    from triton.runtime.jit import JITFunction

    def get_item(kernel: JITFunction, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: object, **kwargs: object) -> None:
            compiled = kernel.warmup(*args, grid=grid, **kwargs)
            line = {"kernel": kernel.fn.__name__, "shared": compiled.metadata.shared}
            print(json.dumps(line | resources(compiled.asm["cubin"])), flush=True)

        return launch

    JITFunction.__getitem__ = get_item


def run_all(dtype: torch.dtype, heads: tuple[int, int], head_dim: int, block_size: int) -> None:
    from worker.ops.cuda import CudaOperations
    from worker.ops.table import HeadNorms
    from worker.ops.triton.sampling import draw
    from worker.window import NO_WINDOW

    ops = CudaOperations()
    shape = make_shape(*heads, head_dim)
    step = make_step([(1, 300), (20, 40)], shape, block_size=block_size, dtype=dtype)
    batch = replace(step.batch, max_context_len=100_000)
    weight, hidden = torch.ones(head_dim, dtype=dtype), torch.ones(21, 4096, dtype=dtype)
    qkv = torch.zeros(21, shape.qkv_width, dtype=dtype)
    ops.begin_step(batch, shape, block_size)
    norms = HeadNorms(weight, weight, 1e-6)
    ops.rotate_and_store(qkv, step.kv, batch, shape, torch.ones(64, head_dim), norms)
    ops.rotate_and_store(qkv, step.kv, batch, shape, torch.ones(64, head_dim), None)
    ops.paged_attention(step.q, step.kv, batch, shape, NO_WINDOW)
    ops.rms_norm(hidden, hidden[0], 1e-6)
    ops.add_rms_norm(hidden, hidden, hidden[0], 1e-6)
    ops.gated_activation(hidden)
    ops.embedding(batch.token_ids, ops.pack_embedding(hidden), 0)
    whole, share = torch.ones(4, dtype=torch.int64), torch.ones(4, dtype=torch.float64)
    draw(torch.zeros(4, 128_256), torch.ones(4), whole, share, share, whole, whole)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_CACHE_DIR"] = sys.argv[2]
    from triton.runtime import driver

    driver.set_active(AbsentGpu(int(sys.argv[1])))
    compile_instead_of_launching()
    run_all(torch.bfloat16, (32, 8), 128, 16)
    if sys.argv[1] == "80":  # the rest once is enough
        run_all(torch.float32, (7, 1), 64, 8)
        run_all(torch.float16, (2, 2), 256, 32)
