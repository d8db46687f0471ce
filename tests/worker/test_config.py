"""What a rank may be told, and the type it then computes in."""

from pathlib import Path

import pytest
import torch

from worker.config import RunnerConfig
from worker.runner import choose_dtype


def make_config(**changes: object) -> RunnerConfig:
    return RunnerConfig(model_dir=Path("model"), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "int8"}, "dtype must be one of auto, float32, bfloat16, float16, got 'int8'"),
        ({"device": "tpu"}, "device must be one of cpu, cuda, got 'tpu'"),
        ({"ops": "fast"}, "ops must be one of auto, reference, cpu, cuda"),
        ({"ops": "cuda"}, "ops='cuda' needs device='cuda', got device='cpu'"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"max_num_seqs": -1}, "max_num_seqs must be at least 1, got -1"),
        ({"max_model_len": 0}, "max_model_len must be at least 1"),
        ({"num_kv_blocks": 0}, "num_kv_blocks must be at least 1"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes must be at least 1"),
        ({"num_threads": 0}, "num_threads must be at least 1"),
        ({"ranks_on_host": 0}, "ranks_on_host must be at least 1"),
        ({"rank": 2, "tensor_parallel_size": 2}, "rank must be from 0 to 1 .* got 2"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization must be above 0"),
        ({"gpu_memory_utilization": 1.5}, "at most 1, got 1.5"),
    ],
)
def test_a_setting_out_of_range_is_named_with_its_limits(
    changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        make_config(**changes)


@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_a_type_that_is_asked_for_is_taken(wanted: str) -> None:
    found = choose_dtype(wanted, "float32")

    assert found == getattr(torch, wanted)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_auto_is_the_type_of_the_checkpoint(name: str) -> None:
    assert choose_dtype("auto", name) == getattr(torch, name)
