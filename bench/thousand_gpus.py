"""What a thousand GPUs ask of the engine cores: the real scheduler, in a time that is simulated.

Each core of the simulation is a `Scheduler` with its groups, a load of requests that come at
random, and one processor, which is busy for as long as plan, wire format and apply really take
here, and `--io-us` more per step for sockets and the loop (`bench.core_scale` measures the sum).
Groups only take time: `--step-ms` a step, and more for each prompt token in it. So the core falls
behind as a real one would, and what that costs shows in how long devices stand idle.

    python -m bench.thousand_gpus
"""

import argparse
import heapq
import math
import time
from dataclasses import dataclass, field

import numpy as np

from bench.report import header, percentile, table
from cluster.engine_main import calm_collector
from cluster.wire import FROM_ENGINE, TO_CLIENT, TO_ENGINE
from scheduler.arrays import int32
from scheduler.config import ModelLimits, SchedulerConfig
from scheduler.outbox import Outgoing
from scheduler.plan import StepPlan, StepResult
from scheduler.request import Request
from scheduler.sampling import SamplingParams
from scheduler.scheduler import Scheduler

VOCAB_SIZE = 32_000
NUM_SEQUENCES = 256
PROMPT_TOKENS, OUTPUT_TOKENS = 256, 256
"""On average; outputs are from 1 to twice as long."""
PROMPT_TOKEN_S = 10e-6
"""By which a step takes longer for each prompt token."""
SETTLE_S = 0.5
NUM_CLIENTS = 4
"""Front ends that share a core's streams."""
FULL = 0.02
"""A core is full when its devices stand idle for more of the time than this, because of it."""
GROUPS_PER_CORE = (4, 8, 16, 20, 24, 32)
LAYOUTS = ((8, 30.0), (4, 25.0), (2, 20.0), (1, 15.0))
"""GPUs of a group, and milliseconds of a step of 256 sequences."""


@dataclass(slots=True)
class Device:
    """The ranks of one group, as far as their time goes."""

    free_at: float = 0.0
    """When all that it was given is computed."""
    idle_s: float = 0.0
    """That it waited for a plan though it had sequences."""
    num_running: int = 0


@dataclass(slots=True)
class Load:
    """How much is asked of each group."""

    step_s: float
    share: float
    """Of the places for sequences that are taken on average."""

    @property
    def requests_per_s(self) -> float:
        """Per group: each place that is taken is left again after its request's steps."""
        steps = OUTPUT_TOKENS + 1
        per_step = self.share * NUM_SEQUENCES / steps
        return per_step / (self.step_s + per_step * PROMPT_TOKENS * PROMPT_TOKEN_S)


@dataclass(slots=True)
class Figures:
    """Of the window that counts."""

    num_steps: int = 0
    num_tokens: int = 0
    core_s: float = 0.0
    delays_s: list[float] = field(default_factory=list)
    """From each answer of a group until the core came to it."""
    first_s: list[float] = field(default_factory=list)
    """From each request until its first token left the core."""


class Core:
    """One engine core with its groups."""

    def __init__(self, num_groups: int, load: Load, io_s: float, seed: int) -> None:
        self._load, self._io_s = load, io_s
        self._rng = np.random.default_rng(seed)
        limits = ModelLimits(vocab_size=VOCAB_SIZE, max_model_len=4096)
        config = SchedulerConfig(
            max_num_seqs=NUM_SEQUENCES,
            max_num_batched_tokens=2048,
            max_waiting_requests=1_000_000,
            max_waiting_tokens=10**9,
        )
        self._scheduler = Scheduler(config, limits)
        self._devices = [Device() for _ in range(num_groups)]
        blocks = NUM_SEQUENCES * (PROMPT_TOKENS + 2 * OUTPUT_TOKENS) // config.block_size
        for group in range(num_groups):
            self._scheduler.add_group(group, 1, blocks, 0.0)
        self._events: list[tuple[float, int, int, StepResult | None]] = []
        """Answers of groups, and requests (of group -1), as they come to the core."""
        self._num_events = self._num_requests = 0
        self._arrived: dict[int, float] = {}
        self._free_at = 0.0
        self._is_filling = True
        self.figures = Figures()

    def run(self, settle_s: float, window_s: float) -> None:
        """Fill all places, which costs the core nothing; then let it settle, and count."""
        for _ in range(int(self._load.share * NUM_SEQUENCES * len(self._devices))):
            self._submit(0.0, left=float(self._rng.random()))
        for group in range(len(self._devices)):
            self._plan(group, 0.0)
        while self._scheduler.num_waiting:
            self._next()
        self._is_filling = False
        self._put(self._events[0][0], -1, None)
        begin_s = self._events[0][0] + settle_s
        while self._events[0][0] < begin_s:
            self._next()
        self.figures = Figures()
        for device in self._devices:
            device.idle_s = 0.0
        while self._events[0][0] < begin_s + window_s:
            self._next()

    def _next(self) -> None:
        at, _, group, result = heapq.heappop(self._events)
        began = max(at, self._free_at)
        if result is None:
            self._request(at, began)
        else:
            self.figures.delays_s.append(began - at)
            self._answered(group, result, began)

    @property
    def idle_share(self) -> float:
        """Of the devices' time, in which they waited for the core."""
        seconds = sum(device.idle_s for device in self._devices)
        steps = self.figures.num_steps * self._load.step_s
        return seconds / (seconds + steps) if steps else 0.0

    def _put(self, at: float, group: int, result: StepResult | None) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at, self._num_events, group, result))

    def _spend(self, began: float, seconds: float) -> float:
        """The core is busy; until when it is."""
        if not self._is_filling:
            self.figures.core_s += seconds
            self._free_at = began + seconds
        return max(began, self._free_at)

    def _request(self, at: float, began: float) -> None:
        rate = self._load.requests_per_s * len(self._devices)
        self._put(at + float(self._rng.exponential(1.0 / rate)), -1, None)
        self._spend(began, self._submit(at))
        for group, device in enumerate(self._devices):
            if not device.num_running:
                self._plan(group, self._free_at)

    def _submit(self, at: float, left: float = 1.0) -> float:
        """A request of which so much is left; what that costs the core."""
        self._num_requests += 1
        length = int(self._rng.integers(1, 2 * OUTPUT_TOKENS) * left)
        request = Request(
            handle=self._num_requests,
            prompt=int32(self._rng.integers(0, VOCAB_SIZE, PROMPT_TOKENS)),
            sampling=SamplingParams(temperature=0.0, max_tokens=1 + length, ignore_eos=True),
        )
        self._arrived[request.handle] = at
        began = time.process_time()
        refused = self._scheduler.submit(request, 1 + request.handle % NUM_CLIENTS, at)
        assert refused is None, refused
        return time.process_time() - began

    def _answered(self, group: int, result: StepResult, at: float) -> None:
        frame = TO_ENGINE.encode(result)
        began = time.process_time()
        answer = TO_ENGINE.decode(frame)
        assert isinstance(answer, StepResult)
        outgoing = self._scheduler.apply(group, answer, at)
        for out in outgoing:
            TO_CLIENT.encode(out.batch)
        done = self._spend(at, time.process_time() - began + self._io_s)
        self.figures.num_steps += 1
        self.figures.num_tokens += len(result.token)
        self._note_first_tokens(outgoing, done)
        self._plan(group, done)

    def _note_first_tokens(self, outgoing: list[Outgoing], at: float) -> None:
        for out in outgoing:
            for started in out.batch.started:
                self.figures.first_s.append(at - self._arrived.pop(started.handle))

    def _plan(self, group: int, at: float) -> None:
        """Give the group as many plans as it takes."""
        device = self._devices[group]
        while True:
            began = time.process_time()
            plan = self._scheduler.plan(group, at)
            if plan is not None:
                FROM_ENGINE.encode(plan)
            at = self._spend(at, time.process_time() - began)
            if plan is None:
                break
            self._compute(group, device, plan, at)
        device.num_running = self._scheduler.groups[group].num_running

    def _compute(self, group: int, device: Device, plan: StepPlan, at: float) -> None:
        if device.num_running:
            device.idle_s += max(0.0, at - device.free_at)
        rows = len(plan.slot)
        device.num_running = rows
        num_prompt_tokens = max(0, int(plan.count.sum()) - rows)
        took_s = self._load.step_s + num_prompt_tokens * PROMPT_TOKEN_S
        device.free_at = max(at, device.free_at) + took_s
        count = int(plan.samples.sum()) if len(plan.samples) else rows
        result = StepResult(
            epoch=plan.epoch,
            step=plan.step,
            token=int32(self._rng.integers(0, VOCAB_SIZE, count)),
            compute_s=took_s,
        )
        self._put(device.free_at, group, result)


def simulated(num_groups: int, load: Load, io_s: float, window_s: float, seed: int) -> Core:
    core = Core(num_groups, load, io_s, seed)
    core.run(SETTLE_S, window_s)
    return core


def row_of(num_groups: int, core: Core, window_s: float) -> list[str]:
    figures = core.figures
    return [
        str(num_groups),
        f"{figures.num_tokens / window_s:,.0f}",
        f"{1e6 * figures.core_s / max(1, figures.num_steps):.0f}",
        f"{figures.core_s / window_s:.0%}",
        f"{1e3 * percentile(figures.delays_s, 0.99):.1f}",
        f"{1e3 * percentile(figures.first_s, 0.5):.0f}",
        f"{1e3 * percentile(figures.first_s, 0.99):.0f}",
        f"{core.idle_share:.1%}",
    ]


def needs(num_gpus: int, gpus_per_group: int, step_ms: float, step_cpu_s: float) -> list[str]:
    """Of all the GPUs, by arithmetic: a core is loaded to 70 %."""
    groups = num_gpus // gpus_per_group
    each = max(1, int(0.7 * step_ms / 1e3 / step_cpu_s))
    cores = math.ceil(groups / each)
    tokens = groups * NUM_SEQUENCES / (step_ms / 1e3)
    here = math.ceil(groups / cores)
    return [
        f"{groups} x {gpus_per_group}",
        f"{step_ms:g}",
        f"{tokens / 1e6:.2f} M",
        str(each),
        str(cores),
        f"{tokens / OUTPUT_TOKENS:,.0f}",
        f"{here * gpus_per_group:,}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=1000)
    parser.add_argument("--groups", type=int, nargs="+", default=GROUPS_PER_CORE, help="of a core")
    parser.add_argument("--step-ms", type=float, default=30.0)
    parser.add_argument("--share", type=float, default=0.8, help="of the places that are taken")
    parser.add_argument("--io-us", type=float, default=250.0, help="of a core, per step")
    parser.add_argument("--window-s", type=float, default=1.0, help="of simulated time")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(header(args.seed))
    load = Load(step_s=args.step_ms / 1e3, share=args.share)
    print(
        f"\none core: groups of {NUM_SEQUENCES} places, {args.share:.0%} of them taken, steps of "
        f"{args.step_ms:g} ms, prompts of {PROMPT_TOKENS} and outputs of {OUTPUT_TOKENS} tokens\n"
    )
    calm_collector()
    head = ["groups", "tokens/s", "core us per step", "core busy", "waits p99, ms"]
    rows = [[*head, "TTFT p50, ms", "TTFT p99, ms", "devices idle"]]
    step_cpu_s = 0.0
    for num_groups in args.groups:
        core = simulated(num_groups, load, args.io_us / 1e6, args.window_s, args.seed)
        if core.idle_share <= FULL:
            step_cpu_s = core.figures.core_s / core.figures.num_steps
        rows.append(row_of(num_groups, core, args.window_s))
    print(table(rows))
    print(f"\n{args.gpus} GPUs with cores at 70 %, {1e6 * step_cpu_s:.0f} us a step\n")
    head = ["groups x GPUs", "step, ms", "tokens/s", "groups per core", "cores", "requests/s"]
    print(
        table(
            [
                [*head, "back sockets of a core"],
                *(needs(args.gpus, gpus, step_ms, step_cpu_s) for gpus, step_ms in LAYOUTS),
            ]
        )
    )


if __name__ == "__main__":
    main()
