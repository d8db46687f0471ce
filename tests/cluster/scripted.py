"""A worker whose tokens are a function of their position, and what can go wrong with it."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cluster.backend import WorkerLaunch
from cluster.messages.workers import RankCapacity
from scheduler.arrays import int32
from scheduler.plan import StepPlan, StepResult
from worker.errors import ModelError
from worker.parallel_errors import PeerLost

VOCAB_SIZE = 1000


def token_at(position: int) -> int:
    """What the scripted model says at a position, whatever came before."""
    return (position * 7 + 3) % VOCAB_SIZE


def tokens_after(num_prompt: int, count: int) -> list[int]:
    return [token_at(num_prompt + i) for i in range(count)]


@dataclass(slots=True)
class Script:
    """What a rank does out of the ordinary."""

    num_blocks: int = 64
    max_model_len: int = 256
    raise_at_step: int | None = None
    lose_peer_at_step: int | None = None
    hang_at_step: int | None = None
    raise_at_token: int | None = None
    """Raise whenever a prompt holds this."""
    fail_at_load: str = ""
    unusable_model: str = ""
    """What a worker says that cannot serve the model."""
    load_s: float = 0.0
    """Loading takes this long."""
    load_until: str = ""
    """Loading goes on until there is a file of this name."""
    step_s: float = 0.0
    """A step takes this long,"""
    token_s: float = 0.0
    """and this for each of its tokens."""
    wrong_step: bool = False
    """Answer with another step's number."""
    hold: threading.Event | None = None
    """Wait for this before each step."""
    released: threading.Event = field(default_factory=threading.Event)
    """Ends a hang."""
    has_loaded: bool = False
    num_resets: int = 0
    fail_at_reset: str = ""
    allocated: list[int] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    done: dict[int, threading.Event] = field(default_factory=dict)
    """By step: until then a device computes it, and its host is free."""
    alone: tuple[int, ...] = ()
    """Steps that may begin only when the one before is finished."""


@dataclass(frozen=True, slots=True)
class ScriptedStep:
    """Computed when it began, or answered only when the test lets it."""

    result: StepResult | None
    done: threading.Event | None = None

    def is_done(self) -> bool:
        return self.done is None or self.done.is_set()

    def finish(self) -> StepResult | None:
        if self.done is not None:
            assert self.done.wait(20)
        return self.result


class ScriptedRunner:
    """Looks like `worker.runner.ModelRunner` to a `WorkerHost`."""

    def __init__(self, launch: WorkerLaunch, script: Script) -> None:
        self._launch = launch
        self._script = script

    def load(self, report: Callable[[int, int], None]) -> None:
        print("loading", flush=True)
        report(1, 2)
        self._script.has_loaded = True
        threading.Event().wait(self._script.load_s)
        while self._script.load_until and not Path(self._script.load_until).exists():
            threading.Event().wait(0.02)
        if self._script.unusable_model:
            raise ModelError(self._script.unusable_model)
        if self._script.fail_at_load:
            raise ValueError(self._script.fail_at_load)

    def measure(self) -> RankCapacity:
        script = self._script
        return RankCapacity(
            num_blocks=script.num_blocks,
            block_bytes=1024,
            vocab_size=VOCAB_SIZE,
            max_model_len=script.max_model_len,
            device="script",
        )

    def allocate(self, num_blocks: int) -> None:
        assert num_blocks <= self._script.num_blocks
        self._script.allocated.append(num_blocks)

    def reset(self) -> None:
        if self._script.fail_at_reset:
            raise RuntimeError(self._script.fail_at_reset)
        self._script.num_resets += 1
        self._script.plans.clear()

    def can_begin(self, plan: StepPlan) -> bool:
        return plan.step not in self._script.alone

    def begin(self, plan: StepPlan) -> ScriptedStep:
        return ScriptedStep(self._execute(plan), self._script.done.get(plan.step))

    def _execute(self, plan: StepPlan) -> StepResult | None:
        script = self._script
        script.plans.append(plan)
        num_tokens = int(plan.count.sum()) if len(plan.count) else len(plan.slot)
        compute_s = script.step_s + script.token_s * num_tokens
        threading.Event().wait(compute_s)
        if script.hold is not None:
            script.hold.wait(20)
        if plan.step == script.raise_at_step:
            raise RuntimeError("a kernel went wrong")
        if plan.step == script.lose_peer_at_step:
            why = "rank 1 left"
            raise PeerLost(why, rank=0, peer=1, step=plan.step, collective=1)
        if script.raise_at_token in plan.token.tolist():
            raise RuntimeError("this token breaks the kernel")
        if plan.step == script.hang_at_step:
            script.released.wait(20)
        launch = self._launch
        last_stage = launch.num_ranks - launch.num_ranks // launch.pipeline_parallel_size
        if launch.rank != last_stage:
            return None
        return StepResult(
            epoch=plan.epoch,
            step=plan.step + script.wrong_step,
            token=int32([token_at(int(end)) for end in _sampling_ends(plan)]),
            compute_s=compute_s,
        )

    def close(self) -> None:
        self._script.released.set()


def _sampling_ends(plan: StepPlan) -> list[int]:
    counts = plan.count if len(plan.count) else [1] * len(plan.slot)
    samples = plan.samples if len(plan.samples) else [True] * len(plan.slot)
    rows = zip(plan.start, counts, samples, strict=True)
    return [int(start) + int(count) for start, count, does_sample in rows if does_sample]
