"""A scheduler of the simplest kind, to drive a `ModelRunner` in tests.

Each sequence gets its blocks when it is admitted. What goes into a step is the test's choice.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvcache.geometry import blocks_for
from scheduler.arrays import int32
from scheduler.plan import Admission, StepPlan, StepResult
from scheduler.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=None, seed=0)


@dataclass(slots=True, eq=False)
class Driven:
    """A running sequence."""

    slot: int
    prompt: list[int]
    output: list[int] = field(default_factory=list)
    computed: int = 0
    given: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class PlanDriver:
    """Builds plans for one group and takes in their results."""

    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int,
        num_slots: int,
        epoch: int = 1,
        gives_all: bool = False,
    ) -> None:
        """`gives_all`: plans carry sampled tokens too, as several stages need."""
        self.block_size, self.epoch = block_size, epoch
        self._gives_all = gives_all
        self.step = 0
        self.idle = list(range(num_blocks))
        self._slots = list(range(num_slots))
        self._released: list[int] = []
        self._admitted: list[Admission] = []
        self._blocks: dict[int, list[int]] = {}

    def admit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams = GREEDY,
        *,
        room: int = 64,
        shared: Sequence[int] = (),
        output: Sequence[int] = (),
        history: bool = False,
    ) -> Driven:
        """Take a slot in the next plan, with blocks for `room` tokens of output.

        Args:
            shared: full blocks that already hold, or will hold after the next step's writes,
                the prompt's first tokens.
            output: tokens sampled before a preemption.
        """
        slot = self._slots.pop(0)
        length = len(prompt) + len(output) + room
        own = blocks_for(length, self.block_size) - len(shared)
        blocks = [*shared, *(self.idle.pop(0) for _ in range(own))]
        cached = len(shared) * self.block_size
        self._blocks[slot] = blocks
        self._admitted.append(
            Admission(
                slot=slot,
                sampling=sampling,
                num_prompt=len(prompt),
                blocks=int32(blocks),
                num_cached=cached,
                history=int32([*prompt, *output][:cached] if history else []),
            )
        )
        return Driven(slot, list(prompt), list(output), computed=cached, given=cached)

    def blocks_of(self, sequence: Driven) -> list[int]:
        return self._blocks[sequence.slot]

    def release(self, sequence: Driven, *, keep_blocks: bool = False) -> None:
        self._released.append(sequence.slot)
        self._slots.append(sequence.slot)
        blocks = self._blocks.pop(sequence.slot)
        if not keep_blocks:
            self.idle += blocks

    def plan(self, slices: Iterable[tuple[Driven, int]]) -> StepPlan:
        """Compute so many more tokens of each sequence; the last known one yields a token."""
        rows = list(slices)
        self.step += 1
        token: list[int] = []
        given: list[int] = []
        samples: list[bool] = []
        starts = [sequence.computed for sequence, _ in rows]
        for sequence, count in rows:
            stop = sequence.computed + count
            admitted = max(len(sequence.prompt), sequence.given)
            if self._gives_all:
                admitted = len(sequence.tokens)
            known = sequence.tokens[sequence.computed : min(stop, admitted)]
            token += known
            given.append(len(known))
            samples.append(stop == len(sequence.tokens))
            sequence.computed = stop
        plan = StepPlan(
            epoch=self.epoch,
            step=self.step,
            released=int32(self._released),
            admitted=tuple(self._admitted),
            slot=int32([sequence.slot for sequence, _ in rows]),
            start=int32(starts),
            count=int32([count for _, count in rows]),
            samples=np.array(samples, dtype=np.bool_),
            given=int32(given),
            token=int32(token),
        )
        self._released, self._admitted = [], []
        return plan

    @staticmethod
    def take(slices: Iterable[tuple[Driven, int]], plan: StepPlan, result: StepResult) -> None:
        """Append the sampled tokens to their sequences."""
        sampling = [
            sequence for (sequence, _), samples in zip(slices, plan.samples, strict=True) if samples
        ]
        for sequence, token in zip(sampling, result.token.tolist(), strict=True):
            sequence.output.append(token)
