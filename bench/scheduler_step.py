"""Core time per step, without a model: plan, encode, decode the result, apply, batch out.

Steady decode at several numbers of running sequences, and the admission of many prompts.
All of the core's work counts, hashing of full blocks, block allocation and the encoding of
the clients' batches included; sockets do not.
"""

import argparse
import gc
import statistics
import time

import numpy as np

from bench.report import header, percentile, table
from cluster.wire import FROM_ENGINE, TO_CLIENT, TO_ENGINE
from scheduler.arrays import int32
from scheduler.config import ModelLimits, SchedulerConfig
from scheduler.plan import StepPlan, StepResult
from scheduler.request import Request
from scheduler.sampling import SamplingParams
from scheduler.scheduler import Scheduler

VOCAB = 49152


def make_scheduler(num_seqs: int, budget: int, num_blocks: int = 100_000) -> Scheduler:
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=budget,
            max_waiting_requests=100_000,
            max_waiting_tokens=10**9,
        ),
        ModelLimits(vocab_size=VOCAB, max_model_len=8192),
        journal=lambda record: None,
    )
    scheduler.add_group(0, 1, num_blocks, 0.0)
    return scheduler


def make_requests(count: int, prompt_len: int, rng: np.random.Generator) -> list[Request]:
    return [
        Request(
            handle=handle,
            prompt=int32(rng.integers(1000, 31000, prompt_len)),
            sampling=SamplingParams(temperature=0.0, max_tokens=4000, ignore_eos=True),
        )
        for handle in range(count)
    ]


def answer_to(plan: StepPlan, rng: np.random.Generator) -> bytes:
    """What a worker would send."""
    sampled = int(plan.samples.sum()) if len(plan.samples) else len(plan.slot)
    token = int32(rng.integers(1000, 31000, sampled))
    return TO_ENGINE.encode(
        StepResult(epoch=plan.epoch, step=plan.step, token=token, compute_s=0.01)
    )


class Clock:
    """Seconds spent in the core's own parts, by part."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = {"plan": [], "wire": [], "apply": []}
        self.plan_bytes = self.result_bytes = 0

    def step(self, scheduler: Scheduler, rng: np.random.Generator) -> bool:
        """One whole step; False if there was nothing to plan."""
        start = time.perf_counter()
        plan = scheduler.plan(0, 1.0)
        planned = time.perf_counter()
        if plan is None:
            return False
        frame = FROM_ENGINE.encode(plan)
        encoded = time.perf_counter()
        answer = answer_to(plan, rng)
        received = time.perf_counter()
        result = TO_ENGINE.decode(answer)
        decoded = time.perf_counter()
        assert isinstance(result, StepResult)
        outgoing = scheduler.apply(0, result, 1.0)
        applied = time.perf_counter()
        for out in outgoing:
            TO_CLIENT.encode(out.batch)
        sent = time.perf_counter()
        self.parts["plan"].append(planned - start)
        self.parts["wire"].append(encoded - planned + decoded - received + sent - applied)
        self.parts["apply"].append(applied - decoded)
        self.plan_bytes, self.result_bytes = len(frame), len(answer)
        return True

    def totals(self) -> list[float]:
        return [sum(parts) for parts in zip(*self.parts.values(), strict=True)]


def steady_decode(num_running: int, steps: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    scheduler = make_scheduler(num_running, max(8192, num_running))
    for request in make_requests(num_running, 128, rng):
        scheduler.submit(request, 1, 0.0)
    warm = Clock()
    while scheduler.num_waiting or scheduler.stats().groups[0].running < num_running:
        warm.step(scheduler, rng)
    for _ in range(20):
        warm.step(scheduler, rng)
    gc.collect()
    gc.freeze()
    clock = Clock()
    for _ in range(steps):
        clock.step(scheduler, rng)
    totals = clock.totals()
    middle = {part: statistics.median(values) * 1e6 for part, values in clock.parts.items()}
    return [
        str(num_running),
        *(f"{middle[part]:.0f}" for part in ("plan", "wire", "apply")),
        f"{statistics.median(totals) * 1e6:.0f}",
        f"{percentile(totals, 0.9) * 1e6:.0f}",
        str(clock.plan_bytes),
        str(clock.result_bytes),
    ]


def admission(count: int, prompt_len: int, seed: int) -> tuple[float, int]:
    """Core seconds and steps until every prompt has its first token."""
    rng = np.random.default_rng(seed)
    scheduler = make_scheduler(count, 8192)
    requests = make_requests(count, prompt_len, rng)
    gc.collect()
    start = time.perf_counter()
    for request in requests:
        scheduler.submit(request, 1, 0.0)
    spent = time.perf_counter() - start
    clock = Clock()
    while scheduler.counters.prefill_tokens < count * prompt_len:
        clock.step(scheduler, rng)
    return spent + sum(clock.totals()), len(clock.totals())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[32, 128, 256, 1024])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(header(args.seed))
    print("\nsteady decode, microseconds of core time per step (medians)\n")
    head = ["running", "plan", "wire", "apply", "all", "all p90", "plan bytes", "result bytes"]
    rows = [steady_decode(running, args.steps, args.seed) for running in args.running]
    print(table([head, *rows]))
    seconds, steps = admission(1024, 1000, args.seed)
    print(
        f"\nadmission of 1,024 prompts of 1,000 tokens: {seconds * 1e3:.0f} ms of core time "
        f"in {steps} steps"
    )


if __name__ == "__main__":
    main()
