"""What memory is left for K/V, and how many blocks it holds.

The one home of these sums: start-up feeds them what it measured, `stoker plan` what it expects.
"""

from dataclasses import dataclass

from kvcache.geometry import KVGeometry
from worker.config import RunnerConfig
from worker.errors import PoolTooLarge, PoolTooSmall


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


def share_of_host(
    *, free_bytes: int, activation_bytes: int, utilization: float, ranks_on_host: int
) -> Measured:
    """A CPU rank: its part of the share of what is free, dealt evenly to the host's ranks."""
    share = int(free_bytes * utilization) // ranks_on_host
    return Measured(share - activation_bytes, free_bytes, activation_bytes)


def share_of_device(
    *, total_bytes: int, free_bytes: int, activation_bytes: int, utilization: float
) -> Measured:
    """A GPU rank: the share is of the device's whole memory, whoever uses the rest of it."""
    used = total_bytes - free_bytes
    budget = int(total_bytes * utilization) - used - activation_bytes
    return Measured(min(budget, free_bytes - activation_bytes), free_bytes, activation_bytes)


def num_blocks_for(
    config: RunnerConfig, geometry: KVGeometry, max_model_len: int, measured: Measured
) -> int:
    """Blocks as configured, or as many as the budget, measured or configured, holds.

    Raises:
        PoolTooSmall: the budget does not hold one sequence of `max_model_len`.
        PoolTooLarge: more was configured than is free.
    """
    if config.num_kv_blocks is not None:
        setting = f"num_kv_blocks={config.num_kv_blocks}"
        _check_free(setting, config.num_kv_blocks * geometry.block_bytes, measured)
        return config.num_kv_blocks
    budget = config.kv_cache_memory_bytes
    if budget is None:
        budget = measured.budget_bytes
    else:
        _check_free(f"kv_cache_memory_bytes={budget}", budget, measured)
    wanted = geometry.bytes_for(max_model_len)
    if budget < wanted:
        raise PoolTooSmall(
            wanted_bytes=wanted,
            found_bytes=budget,
            max_model_len=max_model_len,
            token_bytes=geometry.token_bytes,
        )
    return geometry.blocks_in(budget)


def _check_free(setting: str, wanted_bytes: int, measured: Measured) -> None:
    if wanted_bytes > measured.free_bytes:
        raise PoolTooLarge(setting, wanted_bytes=wanted_bytes, free_bytes=measured.free_bytes)
