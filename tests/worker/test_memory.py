"""What is free, what a step takes, and how many blocks that leaves."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
import pytest
import torch

from kvcache.geometry import KVGeometry
from tests.worker.groups import WorkerGroup
from tests.worker.tiny_models import save_model
from worker.budget import Measured, num_blocks_for
from worker.config import RunnerConfig
from worker.errors import PoolTooLarge, PoolTooSmall
from worker.host_memory import free_host_bytes, peak_growth
from worker.kv_store import KVStore
from worker.memory import measure_memory

MIB = 2**20
FREE = 2**30
P = ParamSpec("P")
T = TypeVar("T")
GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=2, head_bytes=8 * 4, block_size=4)


def make_config(**changes: object) -> RunnerConfig:
    return RunnerConfig(model_dir=Path("unused"), **changes)  # type: ignore[arg-type]


def in_fresh_process(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of a function that measures its own process, which must not have freed
    memory of earlier tests to use again."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, args, kwargs)


def use_64_mib() -> None:
    np.ones(64 * MIB // 8)


def measured_with_64_mib() -> Measured:
    return measure_memory(make_config(), torch.device("cpu"), use_64_mib)


def growth_of_a_pool(num_blocks: int) -> int:
    stores: list[KVStore] = []
    return peak_growth(
        lambda: stores.append(KVStore(GEOMETRY, num_blocks, torch.float32, torch.device("cpu")))
    )


def measured(budget_bytes: int) -> Measured:
    return Measured(budget_bytes=budget_bytes, free_bytes=FREE, activation_bytes=0)


def fake_machine(
    folder: Path, *, available_kib: int, group: str = "", files: dict[str, str] | None = None
) -> tuple[Path, Path]:
    """/proc and /sys/fs/cgroup of a machine with a control group, as folders."""
    proc, cgroup = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 999999 kB\nMemAvailable:  {available_kib} kB\n")
    (proc / "self/cgroup").write_text(group)
    for name, content in (files or {}).items():
        (cgroup / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroup / name).write_text(content)
    return proc, cgroup


def test_a_machine_without_limits_offers_what_the_kernel_calls_available(tmp_path: Path) -> None:
    proc, cgroup = fake_machine(tmp_path, available_kib=500, group="0::/\n")

    assert free_host_bytes(proc, cgroup) == 500 * 1024


def test_a_containers_limit_counts_and_its_cached_files_do_not(tmp_path: Path) -> None:
    files = {
        "pod/memory.max": f"{100 * MIB}\n",
        "pod/memory.current": f"{70 * MIB}\n",
        "pod/memory.stat": f"anon 5\ninactive_file {20 * MIB}\n",
        "pod/box/memory.max": "max\n",
        "pod/box/memory.current": f"{70 * MIB}\n",
    }
    proc, cgroup = fake_machine(tmp_path, available_kib=10**6, group="0::/pod/box\n", files=files)

    assert free_host_bytes(proc, cgroup) == 50 * MIB


def test_a_limit_of_the_older_kind_counts_as_well(tmp_path: Path) -> None:
    files = {
        "memory/box/memory.limit_in_bytes": f"{80 * MIB}\n",
        "memory/box/memory.usage_in_bytes": f"{60 * MIB}\n",
    }
    group = "5:cpu:/other\n3:memory:/box\n"
    proc, cgroup = fake_machine(tmp_path, available_kib=10**6, group=group, files=files)

    assert free_host_bytes(proc, cgroup) == 20 * MIB


def test_this_machine_has_some_memory_free() -> None:
    assert free_host_bytes() > MIB


def test_the_peak_of_a_run_is_seen_though_it_has_passed() -> None:
    # An array of this size has pages of its own, whatever memory earlier tests have freed.
    assert peak_growth(use_64_mib) > 60 * MIB


def test_ranks_of_one_host_share_what_is_free() -> None:
    alone = measure_memory(make_config(), torch.device("cpu"), lambda: None)
    shared = measure_memory(make_config(ranks_on_host=4), torch.device("cpu"), lambda: None)

    assert alone.budget_bytes <= 0.9 * alone.free_bytes
    assert shared.budget_bytes <= 0.9 * shared.free_bytes / 4


@pytest.mark.slow
def test_activations_are_taken_from_the_budget() -> None:
    found = in_fresh_process(measured_with_64_mib)

    assert found.activation_bytes > 60 * MIB
    assert found.budget_bytes == int(found.free_bytes * 0.9) - found.activation_bytes


def test_a_budget_becomes_whole_blocks() -> None:
    budget = 10 * GEOMETRY.block_bytes + 1

    assert num_blocks_for(make_config(), GEOMETRY, 40, measured(budget)) == 10


def test_configured_bytes_win_over_the_measured_budget() -> None:
    config = make_config(kv_cache_memory_bytes=12 * GEOMETRY.block_bytes)

    assert num_blocks_for(config, GEOMETRY, 40, measured(0)) == 12


def test_configured_blocks_win_over_everything_and_are_taken_as_said() -> None:
    config = make_config(num_kv_blocks=3, kv_cache_memory_bytes=1)

    assert num_blocks_for(config, GEOMETRY, 40, measured(-5)) == 3


@pytest.mark.parametrize(
    "asked",
    [{"kv_cache_memory_bytes": FREE + 1}, {"num_kv_blocks": FREE // GEOMETRY.block_bytes + 1}],
)
def test_more_than_is_free_is_refused_with_both_numbers(asked: dict[str, int]) -> None:
    (setting,) = asked
    with pytest.raises(PoolTooLarge, match=rf"{setting}=\d+ asks for 1,024\.0 MiB.*1,024\.0 MiB"):
        num_blocks_for(make_config(**asked), GEOMETRY, 40, measured(MIB))


@pytest.mark.parametrize("budget", [-MIB, 0, 10 * GEOMETRY.block_bytes - 1])
def test_a_budget_below_one_request_is_refused_with_the_least_that_would_do(budget: int) -> None:
    with pytest.raises(PoolTooSmall) as refusal:
        num_blocks_for(make_config(), GEOMETRY, 40, measured(budget))

    least = 10 * GEOMETRY.block_bytes
    assert refusal.value.wanted_bytes == least
    assert f"kv_cache_memory_bytes to at least {least}" in str(refusal.value)
    assert "max_model_len=40" in str(refusal.value)
    assert (
        num_blocks_for(make_config(kv_cache_memory_bytes=least), GEOMETRY, 40, measured(budget))
        == 10
    )


@pytest.mark.slow
def test_a_pool_costs_no_memory_before_it_is_used() -> None:
    num_blocks = 512 * MIB // GEOMETRY.block_bytes
    store = KVStore(GEOMETRY, num_blocks, torch.float32, torch.device("cpu"))

    assert in_fresh_process(growth_of_a_pool, num_blocks) < 64 * MIB
    assert store.layers[1].shape == (2, num_blocks, 4, 2, 8)
    assert store.layers[1].dtype == torch.float32
    assert not store.layers[1][1, -1].any()


def test_every_number_of_the_capacity_is_told(tmp_path: Path) -> None:
    _, folder = save_model("llama", tmp_path)
    with WorkerGroup(folder, num_kv_blocks=None, kv_cache_memory_bytes=4 * MIB) as group:
        capacity = group.start()

    assert capacity.block_bytes == 16 * 2 * 3 * 3 * 16 * 4
    assert capacity.num_blocks == 4 * MIB // capacity.block_bytes
    assert capacity.weight_bytes > 0
    assert capacity.free_bytes > 0
    assert (capacity.vocab_size, capacity.max_model_len, capacity.device) == (97, 256, "cpu")


def test_a_rank_measures_its_own_share_of_the_heads(tmp_path: Path) -> None:
    _, folder = save_model("llama", tmp_path)
    with WorkerGroup(folder, tp=2, num_kv_blocks=None, kv_cache_memory_bytes=4 * MIB) as group:
        capacity = group.start()

    # The rank with two of the three KV heads has the fewest blocks, and the group takes them.
    assert capacity.block_bytes == 16 * 2 * 3 * 2 * 16 * 4
