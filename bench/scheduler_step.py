"""Core time per step, without a model: plan, encode, decode the result, apply, batch out.

Steady decode at several numbers of running sequences, the admission of many prompts, and the
hashing of a long one. All of the core's work counts, hashing of full blocks, block allocation,
metrics and the encoding of the clients' batches included; sockets do not. Prompts of 128 tokens
start 64 per step, so that some 1/16 of the sequences fill a block in each step.
"""

import argparse
import statistics
import time

import numpy as np

from bench.engine_step import engine_steps
from bench.report import header, percentile, table
from cluster.engine_main import calm_collector
from cluster.wire import FROM_ENGINE, TO_CLIENT, TO_ENGINE
from kvcache.keys import chain_keys, root_key
from scheduler.arrays import int32
from scheduler.config import ModelLimits, SchedulerConfig
from scheduler.journal import Journal, Record, encode_record
from scheduler.plan import StepPlan, StepResult
from scheduler.request import Request
from scheduler.sampling import SamplingParams
from scheduler.scheduler import Scheduler

VOCAB = 49152


def make_scheduler(
    num_seqs: int, budget: int, num_blocks: int = 100_000, journal: Journal | None = None
) -> Scheduler:
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=budget,
            max_waiting_requests=100_000,
            max_waiting_tokens=10**9,
        ),
        ModelLimits(vocab_size=VOCAB, max_model_len=8192),
        journal,
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


def forget(record: Record) -> None:
    """A journal on nothing: what records cost the core, less the disk."""
    encode_record(record)


def steady_decode(
    num_running: int, steps: int, seed: int, *, num_clients: int = 1, writes_journal: bool = False
) -> list[str]:
    rng = np.random.default_rng(seed)
    scheduler = make_scheduler(
        num_running, max(8192, num_running), journal=forget if writes_journal else None
    )
    for request in make_requests(num_running, 128, rng):
        scheduler.submit(request, 1 + request.handle % num_clients, 0.0)
    warm = Clock()
    while scheduler.num_waiting or scheduler.stats().groups[0].running < num_running:
        warm.step(scheduler, rng)
    for _ in range(20):
        warm.step(scheduler, rng)
    calm_collector()
    clock = Clock()
    for _ in range(steps):
        clock.step(scheduler, rng)
    totals = clock.totals()
    middle = {part: statistics.median(values) * 1e6 for part, values in clock.parts.items()}
    return [
        f"{num_running}{', 4 clients' * (num_clients > 1)}{', journal' * writes_journal}",
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
    calm_collector()
    start = time.perf_counter()
    for request in requests:
        scheduler.submit(request, 1, 0.0)
    spent = time.perf_counter() - start
    clock = Clock()
    while scheduler.counters.prefill_tokens < count * prompt_len:
        clock.step(scheduler, rng)
    return spent + sum(clock.totals()), len(clock.totals())


def hashing(num_tokens: int, seed: int) -> float:
    """Seconds for the keys of all full blocks of one prompt."""
    tokens = int32(np.random.default_rng(seed).integers(0, VOCAB, num_tokens))
    start = time.perf_counter()
    chain_keys(root_key(None), tokens, 16)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[32, 128, 256, 1024])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--runs", type=int, default=5, help="of the admission")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(header(args.seed))
    print("\nsteady decode, microseconds of core time per step (medians)\n")
    head = ["running", "plan", "wire", "apply", "all", "all p90", "plan bytes", "result bytes"]
    rows = [steady_decode(running, args.steps, args.seed) for running in args.running]
    rows.append(steady_decode(args.running[-1], args.steps, args.seed, num_clients=4))
    rows.append(steady_decode(args.running[-1], args.steps, args.seed, writes_journal=True))
    print(table([head, *rows]))
    for running in (args.running[0], args.running[-1]):
        requests = make_requests(running, 128, np.random.default_rng(args.seed))
        loop = engine_steps(requests, VOCAB, args.steps, args.seed)
        print(
            f"\nthe engine's whole loop at {running} running, less sockets: "
            f"{statistics.median(loop) * 1e6:.0f} µs (p90 {percentile(loop, 0.9) * 1e6:.0f})"
        )
    admissions = [admission(1024, 1000, args.seed + run)[0] * 1e3 for run in range(args.runs)]
    hashes = [hashing(32768, args.seed + run) * 1e3 for run in range(20 * args.runs)]
    print(
        f"\nadmission of 1,024 prompts of 1,000 tokens: {statistics.median(admissions):.0f} ms of "
        f"core time (p90 {percentile(admissions, 0.9):.0f}, least {min(admissions):.0f})"
        f"\nkeys of a prompt of 32,768 tokens: {statistics.median(hashes):.2f} ms "
        f"(p90 {percentile(hashes, 0.9):.2f})"
    )


if __name__ == "__main__":
    main()
