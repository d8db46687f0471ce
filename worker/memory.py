"""How many KV blocks a rank can hold: what is free, what computing takes, what is left."""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec import Struct

from kvcache.geometry import KVGeometry
from worker.config import RunnerConfig
from worker.errors import PoolTooSmall

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


class Capacity(Struct, frozen=True, kw_only=True):
    """What one rank measured after loading its share of the model."""

    num_blocks: int
    """KV blocks that it could hold."""
    block_bytes: int
    kv_cache_dtype: str
    """float32, bfloat16, float16 or int8"""
    vocab_size: int
    max_model_len: int
    weight_bytes: int
    activation_bytes: int
    """The most that a step takes beside weights and K/V."""
    free_bytes: int
    """Free on the device, or on the host of a CPU rank, with the weights loaded."""
    device: str


@dataclass(frozen=True, slots=True)
class Measured:
    """Memory of a rank's device with the weights loaded and nothing else of this rank."""

    budget_bytes: int
    """That `gpu_memory_utilization` leaves for K/V; negative if nothing is left."""
    free_bytes: int
    activation_bytes: int

    def less(self, more_bytes: int) -> "Measured":
        """The same with so much more taken beside weights and K/V."""
        return Measured(
            self.budget_bytes - more_bytes, self.free_bytes, self.activation_bytes + more_bytes
        )


def measure_memory(
    config: RunnerConfig, device: torch.device, profile: Callable[[], None]
) -> Measured:
    """Run the largest step (`profile`) and see what it leaves.

    CUDA: the share is of the device's whole memory, whoever uses the rest of it. CPU: it is of
    the memory that is free, dealt evenly to the ranks of the host.
    """
    if device.type == "cuda":
        return _measure_cuda(config, device, profile)
    activation = peak_growth(profile)
    free = free_host_bytes()
    share = int(free * config.gpu_memory_utilization) // config.ranks_on_host
    return Measured(share - activation, free, activation)


def _measure_cuda(
    config: RunnerConfig, device: torch.device, profile: Callable[[], None]
) -> Measured:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    profile()
    torch.cuda.synchronize(device)
    activation = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    budget = int(total * config.gpu_memory_utilization) - (total - free) - activation
    return Measured(min(budget, free - activation), free, activation)


def num_blocks_for(
    config: RunnerConfig, geometry: KVGeometry, max_model_len: int, measured: Measured
) -> int:
    """Blocks as configured, or as many as the budget holds.

    Raises:
        PoolTooSmall: the budget does not hold one sequence of `max_model_len`.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    budget = config.kv_cache_memory_bytes
    if budget is None:
        budget = measured.budget_bytes
    wanted = geometry.bytes_for(max_model_len)
    if budget < wanted:
        raise PoolTooSmall(
            wanted_bytes=wanted,
            found_bytes=budget,
            max_model_len=max_model_len,
            token_bytes=geometry.token_bytes,
        )
    return geometry.blocks_in(budget)


def peak_growth(run: Callable[[], None], proc: Path = PROC) -> int:
    """Most bytes by which this process grew while `run` ran.

    Where the kernel does not let us reset the mark of the peak, it is that of the whole life
    of the process, so the answer is too large rather than too small.
    """
    with suppress(OSError):
        (proc / "self/clear_refs").write_text("5")
    before = _status_bytes(proc, "VmRSS")
    run()
    return max(0, _status_bytes(proc, "VmHWM") - before)


def trim_heap() -> None:
    """Give the system back what this process has freed, where the C library can (glibc)."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def free_host_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Bytes that processes may still take without swapping: the machine's, or less if this
    process lives in a control group (a container) with a limit."""
    available = _kib_fields(proc / "meminfo")["MemAvailable"]
    return min([available, *_group_rooms(proc, cgroup)])


def _group_rooms(proc: Path, cgroup: Path) -> list[int]:
    """What each limited control group above this process still has room for."""
    rooms = []
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, used, cache = cgroup, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit = cgroup / "memory", "memory.limit_in_bytes"
            used, cache = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder == root.parent:
                break
            room = _room_in(folder, limit, used, cache)
            if room is not None:
                rooms.append(room)
    return rooms


def _room_in(folder: Path, limit: str, used: str, cache: str) -> int | None:
    """Limit less use, of which cached files do not count; None where nothing is limited."""
    try:
        most = (folder / limit).read_text().strip()
        in_use = int((folder / used).read_text())
    except (OSError, ValueError):
        return None
    if most == "max":
        return None
    cached = 0
    with suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == cache:
                cached = int(value)
    return max(0, int(most) - in_use + cached)


def _status_bytes(proc: Path, name: str) -> int:
    return _kib_fields(proc / "self/status")[name]


def _kib_fields(file: Path) -> dict[str, int]:
    """The fields of a /proc file that are given in kB, in bytes."""
    fields = {}
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        if unit == "kB":
            fields[name] = int(number) * 1024
    return fields
