"""What is free on a rank's device, and what its largest step takes, by trying."""

from collections.abc import Callable

import torch
from msgspec import Struct

from worker.budget import Measured, share_of_device, share_of_host
from worker.config import RunnerConfig
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
    shared_bytes: int
    """Of `weight_bytes`, what lies in memory that all ranks of this host with the same weights
    share."""
    activation_bytes: int
    """The most that a step takes beside weights and K/V."""
    free_bytes: int
    """Free on the device, or on the host of a CPU rank, with the weights loaded."""
    device: str


def measure_memory(
    config: RunnerConfig,
    device: torch.device,
    profile: Callable[[], None],
    known_bytes: int = 0,
) -> Measured:
    """Run the largest step (`profile`) and see what it leaves.

    CUDA: the share is of the device's whole memory, whoever uses the rest of it. CPU: it is of
    the memory that is free, dealt evenly to the ranks of the host.

    Args:
        known_bytes: what a step's buffers are known to take on a CPU, where a process that uses
            memory again which it has freed before seems to take less.
    """
    if device.type == "cuda":
        return _measure_cuda(config, device, profile)
    activation = max(known_bytes, peak_growth(profile))
    return share_of_host(
        free_bytes=free_host_bytes(),
        activation_bytes=activation,
        utilization=config.gpu_memory_utilization,
        ranks_on_host=config.ranks_on_host,
    )


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
    return share_of_device(
        total_bytes=total,
        free_bytes=free,
        activation_bytes=activation,
        utilization=config.gpu_memory_utilization,
    )
