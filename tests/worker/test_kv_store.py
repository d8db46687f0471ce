"""Which format K/V have, and how many tokens that makes room for."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from scheduler.plan import LogprobRows
from scheduler.sampling import SamplingParams
from tests.worker.groups import WorkerGroup
from tests.worker.plans import PlanDriver
from tests.worker.tiny_models import save_model
from worker.errors import ModelError
from worker.kv_store import choose_kv_dtype, head_width

MIB = 1 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auto_holds_kv_as_the_weights_are(dtype: torch.dtype) -> None:
    for ops_name in ("reference", "cpu", "cuda"):
        assert choose_kv_dtype("auto", dtype, ops_name) == dtype


@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16", "int8"])
def test_the_cpu_set_holds_kv_in_any_format(wanted: str) -> None:
    assert choose_kv_dtype(wanted, torch.float32, "cpu") == getattr(torch, wanted)


def test_the_oracle_refuses_int8_and_says_what_would_do() -> None:
    with pytest.raises(ModelError, match=r"ops 'reference' read float types only\. Use ops='cpu'"):
        choose_kv_dtype("int8", torch.float32, "reference")


@pytest.mark.parametrize("wanted", ["int8", "float32"])
def test_a_gpu_holds_kv_in_the_models_type_and_says_so(wanted: str) -> None:
    with pytest.raises(ModelError, match=rf"kv_cache_dtype='{wanted}'.*own type, bfloat16"):
        choose_kv_dtype(wanted, torch.bfloat16, "cuda")


def test_an_int8_head_is_followed_by_its_scale() -> None:
    assert head_width(64, torch.int8) == 68
    assert head_width(64, torch.bfloat16) == 64


def test_narrower_kv_make_room_for_as_many_more_blocks(tmp_path: Path) -> None:
    _, folder = save_model("llama", tmp_path)
    num_blocks = {}
    for name in ("float32", "bfloat16", "int8"):
        with WorkerGroup(
            folder, num_kv_blocks=None, kv_cache_memory_bytes=4 * MIB, kv_cache_dtype=name
        ) as group:
            capacity = group.start()
            pool = group.runners[0]._store
            assert pool is not None
            held = sum(layer.nbytes for layer in pool.layers)
            assert 4 * MIB - capacity.block_bytes < held <= 4 * MIB
            assert pool.layers[0].shape[1] == capacity.num_blocks
            assert capacity.kv_cache_dtype == name
            num_blocks[name] = capacity.num_blocks

    # Heads of 16: 64 bytes, 32, or 16 and a scale of 4.
    assert num_blocks["bfloat16"] == pytest.approx(2 * num_blocks["float32"], abs=1)
    assert num_blocks["int8"] == pytest.approx(64 / 20 * num_blocks["float32"], abs=4)


def score_prompt(folder: Path, prompt: list[int], kv_cache_dtype: str) -> LogprobRows:
    """Log-probabilities of the prompt's tokens, in two chunks, and the likeliest tokens."""
    asking = SamplingParams(temperature=0.0, max_tokens=None, seed=0, prompt_logprobs=1)
    half = len(prompt) // 2
    with WorkerGroup(folder, kv_cache_dtype=kv_cache_dtype) as group:
        group.start()
        driver = PlanDriver(block_size=16, num_blocks=64, num_slots=8)
        sequence = driver.admit(prompt, asking)
        found = []
        for count in (half, len(prompt) - half):
            plan = driver.plan([(sequence, count)])
            result = group.execute(plan)
            driver.take([(sequence, count)], plan, result)
            assert result.logprobs is not None
            found.append(result.logprobs)
    first, second = found
    assert first.width == second.width == 2
    return msgspec.structs.replace(
        first,
        token=np.concatenate((first.token, second.token)).reshape(-1, 2),
        logprob=np.concatenate((first.logprob, second.logprob)).reshape(-1, 2),
    )


@pytest.mark.parametrize(("name", "near"), [("bfloat16", 0.02), ("float16", 0.003), ("int8", 0.03)])
def test_a_model_over_narrower_kv_stays_near_float32(
    name: str, near: float, tmp_path: Path
) -> None:
    _, folder = save_model("llama", tmp_path)
    prompt = np.random.default_rng(0).integers(0, 97, 60).tolist()

    wide, narrow = (score_prompt(folder, prompt, held) for held in ("float32", name))

    error = np.abs(narrow.logprob - wide.logprob)[:, 0].mean()
    assert 0 < error < near


@pytest.mark.model
@pytest.mark.slow
def test_the_real_model_says_nearly_the_same_over_narrower_kv(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    prompt = tokenizer.encode(text).ids[:900]
    wide = score_prompt(smollm2, prompt, "float32")
    perplexity = np.exp(-wide.logprob[:, 0].mean())
    for name, worse, agreeing in (
        ("bfloat16", 0.005, 0.98),
        ("float16", 0.001, 0.995),
        ("int8", 0.01, 0.97),
    ):
        narrow = score_prompt(smollm2, prompt, name)
        found = np.exp(-narrow.logprob[:, 0].mean())
        agreement = (narrow.token[:, 1] == wide.token[:, 1]).mean()
        print(f"{name}: perplexity {found:.4f} ({perplexity:.4f}), same token {agreement:.4f}")
        assert abs(found / perplexity - 1) < worse
        assert agreement > agreeing
