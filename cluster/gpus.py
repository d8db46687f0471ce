"""What GPUs have, by the names that `stoker plan --gpu` takes.

Memory is what `nvidia-smi` shows as total, a little less than what is printed on the box;
bandwidth and arithmetic (bfloat16, dense, without sparsity) are from NVIDIA's data sheets, each
named beside its line. They are upper bounds: nothing reaches them in full.
"""

import shutil
import subprocess
from dataclasses import dataclass

MIB = 2**20

ASK_S = 5.0
"""For nvidia-smi, which answers in tens of milliseconds unless a driver hangs."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU."""

    name: str
    memory_mib: int
    bandwidth_gb_s: float
    """Of its memory, in 10^9 bytes per second; 0: not known."""
    bf16_tflops: float
    """10^12 operations per second, a multiplication and an addition being two; 0: not known."""

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib * MIB


GPUS = (
    Gpu("B200", 183_359, 7_700, 2_250),  # HGX B200, data sheet 2025, per GPU
    Gpu("H200", 143_771, 4_800, 989),  # H200 SXM, data sheet 2024
    Gpu("H100", 81_559, 3_350, 989),  # H100 SXM, data sheet 2023
    Gpu("H100-PCIe", 81_559, 2_000, 756),  # the same
    Gpu("A100-80G", 81_920, 2_039, 312),  # A100 80GB SXM, data sheet 2021
    Gpu("A100-40G", 40_960, 1_555, 312),  # A100 40GB, data sheet 2021
    Gpu("L40S", 46_068, 864, 362),  # L40S, data sheet 2023
    Gpu("L4", 23_034, 300, 121),  # L4, data sheet 2023
    Gpu("A10", 23_028, 600, 125),  # A10, data sheet 2021
    Gpu("RTX-5090", 32_607, 1_792, 209),  # RTX Blackwell whitepaper, appendix A
    Gpu("RTX-4090", 24_564, 1_008, 165),  # Ada whitepaper, appendix A
    Gpu("RTX-3090", 24_576, 936, 71),  # GA102 whitepaper, appendix A
)


def find_gpu(name: str) -> Gpu | None:
    """The GPU of this name, however it is spelled: `a100 80g` is A100-80G."""
    wanted = _plain(name)
    return next((gpu for gpu in GPUS if _plain(gpu.name) == wanted), None)


def gpus_here() -> tuple[Gpu, ...]:
    """The GPUs of this machine, by asking `nvidia-smi`; none where that is not there."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    try:
        done = subprocess.run(
            [command, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASK_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(_read_line(line) for line in done.stdout.splitlines() if "," in line)


def _read_line(line: str) -> Gpu:
    """`NVIDIA H100 80GB HBM3, 81559` and the like. Names as found, other figures if known."""
    name, _, memory = line.rpartition(",")
    memory_mib = int(memory)
    words = _plain(name)
    for gpu in sorted(GPUS, key=lambda gpu: -len(gpu.name)):
        family = _plain(gpu.name.removesuffix("-80G").removesuffix("-40G"))
        if family in words and abs(gpu.memory_mib - memory_mib) < memory_mib // 10:
            return Gpu(name.strip(), memory_mib, gpu.bandwidth_gb_s, gpu.bf16_tflops)
    return Gpu(name.strip(), memory_mib, 0.0, 0.0)


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
