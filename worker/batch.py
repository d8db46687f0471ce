"""The mirror of the core's slot table, and one plan as flat tensors.

The mirror holds what plans have said so far: tokens, blocks and how much of each running
sequence is computed. It never guesses: a plan that does not fit it is a `ProtocolError`.
Nothing here loops over the slices of a step, only over sequences that begin or end.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvcache.geometry import blocks_for
from kvcache.table import BlockTables
from scheduler.arrays import BoolArray, Int32Array
from scheduler.plan import Admission, StepPlan
from worker.errors import ProtocolError
from worker.ops.table import BatchInputs

ON_ITS_WAY = -1
"""In the token log: sampled on the device, and not read yet."""


@dataclass(frozen=True, slots=True)
class Slices:
    """The slices of one plan with nothing left out. S rows."""

    slot: Int32Array
    start: Int32Array
    """[S] position of the first token"""
    count: Int32Array
    samples: BoolArray
    offsets: Int32Array
    """[S + 1] slice s holds the tokens [offsets[s], offsets[s + 1]) of the step"""

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def stop(self) -> Int32Array:
        """[S] position after the last token: where a sampled token will stand."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Expected:
    """Tokens that a step samples, one per row."""

    slot: Int32Array
    position: Int32Array
    admission: Int32Array
    """Which sequence of the slot"""


class SlotTable:
    """Running sequences by slot, equal to the core's table as of the last plan."""

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, block_size: int, num_blocks: int
    ) -> None:
        self._block_size, self.num_blocks = block_size, num_blocks
        self._max_model_len = max_model_len
        self.tokens: Int32Array = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        """Token log; the extra column takes the token sampled at the very end of a context."""
        self.blocks = BlockTables(max_num_seqs, blocks_for(max_model_len, block_size))
        self._is_held: BoolArray = np.zeros(max_num_seqs, dtype=np.bool_)
        self._num_computed: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)
        self._num_known: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)
        """Tokens that the log holds, or that precede the first one it needed to hold."""
        self._num_admissions: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)
        """Of each slot so far: tells its sequences apart."""
        self._row_of: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)
        """Of the step's slices by slot, to find two of one slot."""
        self._epoch: int | None = None
        self._step = 0

    @property
    def num_held(self) -> int:
        return int(self._is_held.sum())

    def apply(self, plan: StepPlan) -> Slices:
        """Release, admit, add blocks, and take in the tokens of the slices, in this order.

        Raises:
            ProtocolError: the plan does not follow the last one or names what is not there.
        """
        self._follow(plan)
        self._release(plan.released)
        for admission in plan.admitted:
            self._admit(admission)
        self._append_blocks(plan.block_slot, plan.block)
        return self._take_slices(plan)

    def expect(self, slices: Slices) -> "Expected":
        """Note that one more token of each slice that samples is on its way."""
        slot, stop = slices.slot[slices.samples], slices.stop[slices.samples]
        self.tokens[slot, stop] = ON_ITS_WAY
        self._num_known[slot] = stop + 1
        return Expected(slot, stop, self._num_admissions[slot])

    def record(self, expected: "Expected", sampled: npt.NDArray[np.int64]) -> None:
        """Write the tokens into the log, but not where another sequence has the slot by now."""
        is_same = self._num_admissions[expected.slot] == expected.admission
        self.tokens[expected.slot[is_same], expected.position[is_same]] = sampled[is_same]

    def inputs(self, slices: Slices) -> BatchInputs:
        """The step's tensors, on the CPU."""
        if slices.num_tokens == len(slices.slot):
            row, position = slices.slot, slices.start.astype(np.int64)
        else:
            row = np.repeat(slices.slot, slices.count)
            position = np.arange(slices.num_tokens, dtype=np.int64)
            position += np.repeat(slices.start - slices.offsets[:-1], slices.count)
        column, in_block = np.divmod(position, self._block_size)
        cell = self.blocks.rows[row, column] * np.int64(self._block_size) + in_block
        context = slices.stop
        longest = int(context.max())
        table = self.blocks.rows[slices.slot, : blocks_for(longest, self._block_size)]
        return BatchInputs(
            token_ids=torch.from_numpy(self.tokens[row, position].astype(np.int64)),
            positions=torch.from_numpy(position),
            cells=torch.from_numpy(cell),
            slice_offsets=torch.from_numpy(slices.offsets),
            block_tables=torch.from_numpy(np.ascontiguousarray(table)),
            context_lens=torch.from_numpy(context),
            max_slice_len=int(slices.count.max()),
            max_context_len=longest,
        )

    def _follow(self, plan: StepPlan) -> None:
        if self._epoch is None:
            self._epoch = plan.epoch
        if plan.epoch != self._epoch:
            raise ProtocolError(f"plan of epoch {plan.epoch} came in epoch {self._epoch}")
        if plan.step != self._step + 1:
            raise ProtocolError(f"plan of step {plan.step} came after step {self._step}")
        self._step = plan.step

    def _release(self, slots: Int32Array) -> None:
        self._check_held(slots, "released")
        self._is_held[slots] = False
        self.blocks.lengths[slots] = 0

    def _admit(self, admission: Admission) -> None:
        slot, blocks = admission.slot, admission.blocks
        if not 0 <= slot < len(self._is_held):
            raise self._error(f"admits slot {slot}, but there are slots 0 to {self._last_slot}")
        if self._is_held[slot]:
            raise self._error(f"admits slot {slot}, which is held")
        if len(blocks) > self.blocks.rows.shape[1]:
            raise self._error(
                f"gives slot {slot} {len(blocks)} blocks; {self.blocks.rows.shape[1]} hold "
                f"max_model_len={self._max_model_len} tokens"
            )
        self._check_blocks(blocks)
        if admission.num_cached > len(blocks) * self._block_size:
            raise self._error(
                f"says that {admission.num_cached} tokens of slot {slot} are cached, but gives "
                f"{len(blocks)} blocks of {self._block_size}"
            )
        if len(admission.history) not in (0, admission.num_cached):
            raise self._error(
                f"gives slot {slot} a history of {len(admission.history)} tokens, wanted none "
                f"or its {admission.num_cached} cached ones"
            )
        self.blocks.assign(slot, blocks)
        self.tokens[slot, : len(admission.history)] = admission.history
        self._is_held[slot] = True
        self._num_admissions[slot] += 1
        self._num_computed[slot] = admission.num_cached
        self._num_known[slot] = admission.num_cached

    def _append_blocks(self, slots: Int32Array, blocks: Int32Array) -> None:
        if len(slots) != len(blocks):
            raise self._error(f"has {len(slots)} block slots, but {len(blocks)} blocks")
        if not len(slots):
            return
        self._check_held(slots, "given blocks")
        self._check_blocks(blocks)
        order = np.argsort(slots, kind="stable")
        ordered = slots[order]
        is_first = np.diff(ordered, prepend=-1) != 0
        firsts = np.flatnonzero(is_first)
        ordinal = np.arange(len(slots)) - firsts[np.cumsum(is_first) - 1]
        column = self.blocks.lengths[ordered] + ordinal
        if column.max() >= self.blocks.rows.shape[1]:
            worst = int(ordered[column.argmax()])
            raise self._error(
                f"gives slot {worst} more than the {self.blocks.rows.shape[1]} blocks that hold "
                f"max_model_len={self._max_model_len} tokens"
            )
        self.blocks.rows[ordered, column] = blocks[order]
        np.add.at(self.blocks.lengths, slots, 1)

    def _take_slices(self, plan: StepPlan) -> Slices:
        slot, start = plan.slot, plan.start
        num_slices = len(slot)
        count = plan.count if len(plan.count) else np.ones(num_slices, dtype=np.int32)
        samples = plan.samples if len(plan.samples) else np.ones(num_slices, dtype=np.bool_)
        given = plan.given if len(plan.given) else np.zeros(num_slices, dtype=np.int32)
        lengths = {len(start), len(count), len(samples), len(given)}
        if lengths != {num_slices}:
            raise self._error(f"has {num_slices} slices, but columns of {sorted(lengths)} rows")
        offsets = np.zeros(num_slices + 1, dtype=np.int32)
        np.cumsum(count, out=offsets[1:])
        slices = Slices(slot, start, count, samples, offsets)
        self._check_slices(slices, given)
        self._write_given(slices, given, plan.token)
        self._num_computed[slot] = slices.stop
        return slices

    def _check_slices(self, slices: Slices, given: Int32Array) -> None:
        slot, start, stop = slices.slot, slices.start, slices.stop
        self._check_held(slot, "sliced")
        row = np.arange(len(slot), dtype=np.int32)
        self._row_of[slot] = row
        if (self._row_of[slot] != row).any():
            raise self._error("has two slices of one slot")
        computed, known = self._num_computed[slot], self._num_known[slot]
        room = np.minimum(self.blocks.lengths[slot] * self._block_size, self._max_model_len)
        missing = slices.count - given
        rules: tuple[tuple[BoolArray, Int32Array, str, Int32Array | str], ...] = (
            (slices.count < 1, slices.count, "slice length", "at least 1"),
            (start != computed, start, "start", computed),
            (stop > room, stop, "end of slice", room),
            ((missing < 0) | (missing > 1), given, "given tokens", "count or less 1"),
            (
                (missing == 1) & (known != stop),
                stop,
                "end of a slice of known tokens",
                known,
            ),
        )
        if np.logical_or.reduce([is_wrong for is_wrong, *_ in rules]).any():
            for is_wrong, got, name, wanted in rules:
                self._refuse(is_wrong, slot, got, name, wanted)

    def _refuse(
        self,
        is_wrong: BoolArray,
        slot: Int32Array,
        got: Int32Array,
        name: str,
        wanted: Int32Array | str,
    ) -> None:
        """Raise for the first wrong slice; `wanted` is a rule, or a number per slice."""
        if is_wrong.any():
            row = int(is_wrong.argmax())
            rule = wanted if isinstance(wanted, str) else int(wanted[row])
            raise self._error(f"has for slot {slot[row]} {name} {got[row]}; the mirror has {rule}")

    def _write_given(self, slices: Slices, given: Int32Array, token: Int32Array) -> None:
        total = int(given.sum())
        if total != len(token):
            raise self._error(f"gives {len(token)} tokens; its slices name {total}")
        if not total:
            return
        ends = np.cumsum(given)
        position = np.arange(total) + np.repeat(slices.start - (ends - given), given)
        self.tokens[np.repeat(slices.slot, given), position] = token
        is_given = given > 0
        known = self._num_known[slices.slot]
        self._num_known[slices.slot] = np.where(
            is_given, np.maximum(known, slices.start + given), known
        )

    @property
    def _last_slot(self) -> int:
        return len(self._is_held) - 1

    def _check_held(self, slots: Int32Array, what: str) -> None:
        if not len(slots):
            return
        if slots.min() < 0 or slots.max() > self._last_slot:
            wrong = int(slots.min() if slots.min() < 0 else slots.max())
            raise self._error(f"has slot {wrong} {what}; there are slots 0 to {self._last_slot}")
        if not self._is_held[slots].all():
            free = int(slots[~self._is_held[slots]][0])
            raise self._error(f"has slot {free} {what}, which holds no sequence")

    def _check_blocks(self, blocks: Int32Array) -> None:
        if len(blocks) and (blocks.min() < 0 or blocks.max() >= self.num_blocks):
            wrong = int(blocks.min() if blocks.min() < 0 else blocks.max())
            raise self._error(f"names block {wrong}; the pool has 0 to {self.num_blocks - 1}")

    def _error(self, what: str) -> ProtocolError:
        return ProtocolError(f"the plan of step {self._step} {what}")
