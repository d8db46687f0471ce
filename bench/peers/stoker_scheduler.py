"""Our scheduler over the requests that vLLM's is given, with the encoding of messages as well."""

import gc
import json
import statistics
import time

import numpy as np

from bench.peers.scheduler_load import (
    ADMITTED,
    BUDGET,
    HASHED_LEN,
    PROMPT_LEN,
    RUNNING,
    STEPS,
    prompts,
)
from bench.scheduler_step import Clock, make_scheduler
from kvcache.keys import chain_keys, root_key
from scheduler.arrays import int32
from scheduler.request import Request
from scheduler.sampling import SamplingParams


def make_requests(asked: list[list[int]]) -> list[Request]:
    sampling = SamplingParams(temperature=0.0, max_tokens=4000, ignore_eos=True)
    return [
        Request(handle=handle, prompt=int32(prompt), sampling=sampling)
        for handle, prompt in enumerate(asked)
    ]


def steady_decode(running: int) -> float:
    """Median seconds per step: plan, encode, decode the result, apply, encode what goes out."""
    scheduler = make_scheduler(running, BUDGET)
    for request in make_requests(prompts(running, 128)):
        scheduler.submit(request, 1, 0.0)
    chance, warm = np.random.default_rng(0), Clock()
    while scheduler.num_waiting or scheduler.stats().groups[0].running < running:
        warm.step(scheduler, chance)
    for _ in range(20):
        warm.step(scheduler, chance)
    gc.collect()
    clock = Clock()
    for _ in range(STEPS[running]):
        clock.step(scheduler, chance)
    return statistics.median(clock.totals())


def admission() -> float:
    """Seconds of the core until every prompt has its first token, hashing included."""
    scheduler = make_scheduler(ADMITTED, BUDGET)
    requests = make_requests(prompts(ADMITTED, PROMPT_LEN))
    chance, clock = np.random.default_rng(0), Clock()
    gc.collect()
    started = time.perf_counter()
    for request in requests:
        scheduler.submit(request, 1, 0.0)
    spent = time.perf_counter() - started
    while scheduler.counters.prefill_tokens < ADMITTED * PROMPT_LEN:
        clock.step(scheduler, chance)
    return spent + sum(clock.totals())


def hashing() -> float:
    """Median seconds to hash one long prompt."""
    times = []
    for seed in range(9):
        (prompt,) = prompts(1, HASHED_LEN, seed)
        tokens = int32(prompt)
        started = time.perf_counter()
        chain_keys(root_key(None), tokens, 16)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    figures = {f"decode {n}": 1e6 * steady_decode(n) for n in RUNNING}
    figures["admission"] = 1e3 * admission()
    figures["hash"] = 1e3 * hashing()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
