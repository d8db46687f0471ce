"""How many KV blocks a rank can hold: what is free, what computing takes, what is left."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from msgspec import Struct

from kvcache.geometry import KVGeometry
from worker.config import RunnerConfig
from worker.errors import PoolTooSmall
from worker.host_memory import free_host_bytes, peak_growth


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
