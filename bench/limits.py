"""What a device can do at most: bytes per second from its memory, and FLOP per second.

A CPU is measured by a small program that is compiled for it. Of GPUs the makers' figures are
taken where the device is known, and else what a copy and a matrix product reach.
"""

import ctypes
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

PROBE = Path(__file__).with_name("probe.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno")
READ_BYTES = 256 << 20
"""More than any cache holds."""
ROUNDS = 10_000_000
TRIES = 5

GPUS = {
    "B200": (8000e9, 2250e12, 75e12),
    "H200": (4800e9, 989e12, 67e12),
    "H100 PCIe": (2000e9, 756e12, 51e12),
    "H100": (3350e9, 989e12, 67e12),
    "A100-SXM4-80GB": (2039e9, 312e12, 19.5e12),
    "A100 80GB": (1935e9, 312e12, 19.5e12),
    "A100": (1555e9, 312e12, 19.5e12),
    "L40S": (864e9, 362e12, 91.6e12),
    "L4": (300e9, 121e12, 30.3e12),
    "A10": (600e9, 125e12, 31.2e12),
    "T4": (320e9, 65e12, 8.1e12),
    "RTX 4090": (1008e9, 165e12, 82.6e12),
    "RTX 3090": (936e9, 71e12, 35.6e12),
}
"""Bytes/s, FLOP/s with 16-bit inputs (dense), and in float32, by a part of the name; makers'."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one device, for one width of values."""

    device: str
    bytes_per_s: float
    flops_per_s: float
    source: str
    """Where the two figures are from."""


def cpu_limits(threads: int) -> Limits:
    """Measured: the best of a few tries.

    Raises:
        OSError, subprocess.CalledProcessError: there is no C++ compiler, or it fails.
    """
    probe = _built_probe()
    data = np.ones(READ_BYTES // 8)
    read = min(probe.probe_read(data.ctypes.data, READ_BYTES, threads) for _ in range(TRIES))
    multiply = min(probe.probe_multiply(ROUNDS, threads) for _ in range(TRIES))
    flops = ROUNDS * probe.probe_flops_per_round() * threads
    return Limits(
        device=f"CPU, {threads} threads",
        bytes_per_s=READ_BYTES / read,
        flops_per_s=flops / multiply,
        source="measured: reading memory, float32 multiply-adds in registers",
    )


def _built_probe() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "probe.so"
        compiler = os.environ.get("CXX", "c++")
        subprocess.run(
            [compiler, *FLAGS, "-shared", "-fPIC", "-pthread", str(PROBE), "-o", str(library)],
            check=True,
        )
        probe = ctypes.CDLL(str(library))
    long, integer, pointer = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
    probe.probe_read.argtypes, probe.probe_read.restype = (pointer, long, integer), ctypes.c_double
    probe.probe_multiply.argtypes, probe.probe_multiply.restype = (long, integer), ctypes.c_double
    probe.probe_flops_per_round.restype = long
    return probe


def gpu_limits(dtype: torch.dtype) -> Limits:
    """The maker's figures of the current CUDA device, or measured ones where it is not known."""
    name = torch.cuda.get_device_name()
    if (known := known_gpu(name)) is not None:
        bandwidth, half_flops, float_flops = known
        flops = float_flops if dtype == torch.float32 else half_flops
        return Limits(name, bandwidth, flops, "the maker's figures")
    return Limits(
        name,
        _copy_rate(),
        _product_rate(dtype),
        "measured: a copy within its memory, and a matrix product",
    )


def known_gpu(name: str) -> tuple[float, float, float] | None:
    """The entry whose key is in the name; the most particular, if several are."""
    keys = [key for key in GPUS if key in name]
    return GPUS[max(keys, key=len)] if keys else None


def _copy_rate() -> float:
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / _gpu_seconds(lambda: target.copy_(source))


def _product_rate(dtype: torch.dtype, size: int = 8192) -> float:
    a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
    return 2 * size**3 / _gpu_seconds(lambda: torch.matmul(a, b))


def _gpu_seconds(work: Callable[[], object]) -> float:
    """The best of a few, the first to warm up."""
    times = []
    for _ in range(TRIES + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times[1:])
