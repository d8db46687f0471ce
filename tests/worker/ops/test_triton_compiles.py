"""Every kernel becomes machine code of the GPUs in use; Triton brings the assembler along."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_BYTES = 99 * 1024
"""What a program may have on compute capability 8.6, 8.9 and 12.0, the least of all."""

KERNELS = {
    "plan_kernel",
    "decode_kernel",
    "join_kernel",
    "prefill_kernel",
    "rotate_and_store_kernel",
    "rms_norm_kernel",
    "add_rms_norm_kernel",
    "gated_silu_kernel",
    "embedding_kernel",
    "draw_kernel",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_every_kernel_fits_the_gpu(capability: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.worker.ops.compile_kernels"]
    finished = subprocess.run(
        [*command, str(capability), str(tmp_path)], capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    assert "Warning" not in finished.stderr, finished.stderr

    compiled = [json.loads(line) for line in finished.stdout.splitlines()]

    assert {kernel["kernel"] for kernel in compiled} == KERNELS
    for kernel in compiled:
        assert kernel["shared"] <= SHARED_BYTES, kernel
        assert kernel["stack"] <= 64, f"values that spill from registers are slow: {kernel}"
