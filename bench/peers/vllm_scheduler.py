"""vLLM's own `Scheduler`, without a model: `python -m bench.peers.vllm_scheduler MODEL`.

Runs in vLLM's environment and prints the figures that `stoker_scheduler` prints of ours.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from bench.peers.driver import own_stdout
from bench.peers.scheduler_load import (
    ADMITTED,
    BUDGET,
    HASHED_LEN,
    NUM_BLOCKS,
    PROMPT_LEN,
    RUNNING,
    STEPS,
    prompts,
)

BLOCK_SIZE = 16
HASH = "sha256"
"""vLLM's default."""
Hasher = Callable[[Request], list[bytes]]


def make_scheduler(model: str) -> tuple[Scheduler, Hasher]:
    config = EngineArgs(
        model=model,
        dtype="float32",
        max_model_len=8192,
        max_num_seqs=max(RUNNING),
        max_num_batched_tokens=BUDGET,
        enable_prefix_caching=True,
        block_size=BLOCK_SIZE,
        prefix_caching_hash_algo=HASH,
        async_scheduling=False,
    ).create_engine_config()
    config.cache_config.block_size = BLOCK_SIZE
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=3, head_size=64, dtype=torch.float32
    )
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=NUM_BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=False,
    )
    function = get_hash_fn_by_name(HASH)
    init_none_hash(function)
    return scheduler, get_request_block_hasher(BLOCK_SIZE, function)


def make_request(name: str, prompt: list[int], hasher: Hasher | None) -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
    sampling.update_from_generation_config({}, eos_token_id=2)
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=sampling,
        pooling_params=None,
        block_hasher=hasher,
    )


def answer_to(plan: SchedulerOutput, scheduler: Scheduler) -> ModelRunnerOutput:
    """What a worker would say."""
    names = list(plan.num_scheduled_tokens)
    asked = [scheduler.requests[name] for name in names]
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=[
            [5000] if one.num_computed_tokens >= one.num_prompt_tokens else [] for one in asked
        ],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def step(scheduler: Scheduler) -> tuple[float, int]:
    """Seconds of one step's planning and applying, and the tokens it planned."""
    started = time.perf_counter()
    plan = scheduler.schedule()
    planned = time.perf_counter()
    answer = answer_to(plan, scheduler)
    answered = time.perf_counter()
    scheduler.update_from_output(plan, answer)
    spent = planned - started + time.perf_counter() - answered
    return spent, plan.total_num_scheduled_tokens


def steady_decode(model: str, running: int) -> float:
    """Median seconds per step."""
    scheduler, hasher = make_scheduler(model)
    for i, prompt in enumerate(prompts(running, 128)):
        scheduler.add_request(make_request(f"r{i}", prompt, hasher))
    while step(scheduler)[1] != running or scheduler.waiting:
        pass
    gc.collect()
    return statistics.median(step(scheduler)[0] for _ in range(STEPS[running]))


def admission(model: str) -> float:
    """Seconds of hashing, adding and planning until every prompt has its first token."""
    scheduler, hasher = make_scheduler(model)
    asked = prompts(ADMITTED, PROMPT_LEN)
    gc.collect()
    started = time.perf_counter()
    requests = [make_request(f"r{i}", prompt, hasher) for i, prompt in enumerate(asked)]
    for request in requests:
        scheduler.add_request(request)
    spent = time.perf_counter() - started
    while any(one.num_computed_tokens < one.num_prompt_tokens for one in requests):
        spent += step(scheduler)[0]
    return spent


def hashing(model: str) -> float:
    """Median seconds to hash one long prompt."""
    _, hasher = make_scheduler(model)
    times = []
    for seed in range(9):
        (prompt,) = prompts(1, HASHED_LEN, seed)
        plain = make_request(f"h{seed}", prompt, None)
        started = time.perf_counter()
        hasher(plain)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    args = parser.parse_args()
    out = own_stdout()
    figures = {f"decode {n}": 1e6 * steady_decode(args.model, n) for n in RUNNING}
    figures["admission"] = 1e3 * admission(args.model)
    figures["hash"] = 1e3 * hashing(args.model)
    print(json.dumps(figures), file=out, flush=True)


if __name__ == "__main__":
    main()
