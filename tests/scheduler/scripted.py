"""A worker group without a model: it follows plans to the letter and refuses wrong ones.

"K/V" of a position is a hash of all tokens up to it, kept in the block the plan names, so a
wrong block, a stale prefix or a lost token changes every token that follows. The output of
a request is a pure function of its prompt: `expected_output`.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from scheduler.arrays import int32
from scheduler.plan import StepPlan, StepResult

VOCAB = 50
END = 0
_SEED = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def absorb(state: int, token: int) -> int:
    state = ((state ^ (token + 1)) * 0xBF58476D1CE4E5B9) & _MASK
    return state ^ (state >> 29)


def token_after(state: int) -> int:
    """The next token; END about once in 50."""
    return (state >> 17) % VOCAB


def expected_output(
    prompt: list[int], limit: int, *, ends: bool = True, min_len: int = 0
) -> list[int]:
    """Output tokens of a request that may have `limit` tokens in all."""
    state = _SEED
    for token in prompt:
        state = absorb(state, token)
    output: list[int] = []
    while len(prompt) + len(output) < limit:
        token = token_after(state)
        output.append(token)
        if ends and token == END and len(prompt) + len(output) > min_len:
            break
        state = absorb(state, token)
    return output


@dataclass
class _Slot:
    blocks: list[int]
    computed: int
    sampled: int | None = None


@dataclass
class ScriptedWorker:
    """One group's hands. `execute` applies a plan and answers it."""

    num_blocks: int
    block_size: int
    epoch: int = 1
    num_stages: int = 1
    step: int = 0
    slots: dict[int, _Slot] = field(default_factory=dict)
    kv: dict[int, list[int | None]] = field(default_factory=dict)
    computed_tokens: int = 0
    per_step: list[dict[int, int]] = field(default_factory=list)

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.epoch == self.epoch
        assert plan.step == self.step + 1
        self.step = plan.step
        for slot in plan.released.tolist():
            del self.slots[slot]
        for admission in plan.admitted:
            assert admission.slot not in self.slots, "the slot is taken"
            self.slots[admission.slot] = _Slot(admission.blocks.tolist(), admission.num_cached)
        for slot, block in zip(plan.block_slot.tolist(), plan.block.tolist(), strict=True):
            self.slots[slot].blocks.append(block)
        num = len(plan.slot)
        counts = plan.count if len(plan.count) else np.ones(num, dtype=np.int32)
        givens = plan.given if len(plan.given) else np.zeros(num, dtype=np.int32)
        samples = plan.samples if len(plan.samples) else np.ones(num, dtype=np.bool_)
        offsets = np.concatenate([[0], np.cumsum(givens)])
        assert offsets[-1] == len(plan.token)
        todo: deque[int] = deque(range(num))
        states: dict[int, int] = {}
        stuck = 0
        while todo:
            row = todo.popleft()
            tokens = plan.token[offsets[row] : offsets[row + 1]].tolist()
            slot = self.slots[int(plan.slot[row])]
            if len(tokens) < counts[row]:
                assert self.num_stages == 1, "nobody tells the first stage what the last sampled"
                assert len(tokens) == counts[row] - 1
                assert slot.sampled is not None
                tokens.append(slot.sampled)
            state = self._compute(slot, int(plan.start[row]), tokens)
            if state is None:
                todo.append(row)
                stuck += 1
                assert stuck <= num * num + 1, "a slice reads K/V that nobody wrote"
            else:
                states[row] = state
        self.per_step.append(dict(zip(plan.slot.tolist(), counts.tolist(), strict=True)))
        assert len(self.per_step[-1]) == num, "two slices of one sequence in a step"
        sampled = []
        for row in np.flatnonzero(samples).tolist():
            token = token_after(states[row])
            self.slots[int(plan.slot[row])].sampled = token
            sampled.append(token)
        self.computed_tokens += int(counts.sum())
        return StepResult(
            epoch=plan.epoch, step=plan.step, token=int32(sampled), compute_s=0.001 * num
        )

    def _compute(self, slot: _Slot, start: int, tokens: list[int]) -> int | None:
        """Write the slice's states; None if the one before it is not written yet."""
        assert slot.computed == start, f"slice starts at {start}, {slot.computed} are computed"
        state = _SEED
        if start:
            before = self._cell(slot, start - 1)
            if before is None:
                return None
            state = before
        for position, token in enumerate(tokens, start):
            state = absorb(state, token)
            block = slot.blocks[position // self.block_size]
            assert 0 <= block < self.num_blocks
            cells = self.kv.setdefault(block, [None] * self.block_size)
            cells[position % self.block_size] = state
        slot.computed = start + len(tokens)
        return state

    def _cell(self, slot: _Slot, position: int) -> int | None:
        cells = self.kv.get(slot.blocks[position // self.block_size])
        return None if cells is None else cells[position % self.block_size]
