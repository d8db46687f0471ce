"""What a rank takes beside its weights and its K/V, at the most that it ever took."""

from pathlib import Path

import psutil
import pytest

from stoker import LLM, SamplingParams
from worker.shards import deal

MAX_OWN_BYTES = 300 << 20
"""Python, torch, and what a step works in."""

KV_HEADS, BLOCK_SIZE = 3, 16

PROMPTS = [{"prompt_token_ids": list(range(1000, 1000 + 8 * n))} for n in range(1, 33)]


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rank_never_holds_its_weights_twice(smollm2: Path, size: int, dtype: str) -> None:
    with LLM(
        smollm2,
        backend="local",
        tensor_parallel_size=size,
        dtype=dtype,
        num_kv_blocks=128,  # so few that every one is used
        log_level="warning",
    ) as llm:
        sampling = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=8, seed=1, logprobs=2)
        llm.generate(PROMPTS, sampling, use_tqdm=False)
        ranks = llm.client.status().groups[0].ranks
        peaks = [peak_bytes(rank.pid) for rank in ranks]

    for rank, span, peak in zip(ranks, deal(KV_HEADS, size), peaks, strict=True):
        pool = rank.num_blocks * BLOCK_SIZE * span.size * bytes_of_a_head(dtype)
        assert peak < rank.weight_bytes + pool + MAX_OWN_BYTES, f"rank {rank.rank}"


def bytes_of_a_head(dtype: str) -> int:
    """Of one token's K and V in all 30 layers, 64 numbers each."""
    return 2 * 30 * 64 * (4 if dtype == "float32" else 2)


def peak_bytes(pid: int) -> int:
    assert psutil.Process(pid).is_running()
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
