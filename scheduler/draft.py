"""A step while it is being planned: slices, admissions and new blocks, still as lists."""

import numpy as np

from scheduler.arrays import NO_INDEX, NO_INT32, IndexArray, Int32Array, int32
from scheduler.plan import Admission
from scheduler.sequences import Sequence


class StepDraft:
    """Decodes come as columns, prefill slices and admissions one by one."""

    def __init__(self) -> None:
        self.admissions: list[Admission] = []
        self.admitted: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.deferred: dict[int, str] = {}
        """Serials that could have been next, and why they were not."""
        self.grown: IndexArray = NO_INDEX
        """Slots that get a new block each, `block`."""
        self.block: Int32Array = NO_INT32
        self.num_decode = self.num_prefill = 0
        self._decode_slot: IndexArray = NO_INDEX
        self._decode_start: Int32Array = NO_INT32
        self._prefills: dict[int, tuple[int, int]] = {}

    @property
    def num_tokens(self) -> int:
        return self.num_decode + self.num_prefill

    def decode(self, slots: IndexArray, starts: Int32Array) -> None:
        """One token for each slot."""
        self._decode_slot, self._decode_start = slots, starts
        self.num_decode = len(slots)

    def grow(self, slots: IndexArray, blocks: Int32Array) -> None:
        """One new block for each slot."""
        self.grown, self.block = slots, blocks

    def prefill(self, slot: int, start: int, count: int) -> int:
        """`count` tokens of a slot, or so many more of its slice; returns the slice's end."""
        first, taken = self._prefills.get(slot, (start, 0))
        self._prefills[slot] = (first, taken + count)
        self.num_prefill += count
        return first + taken + count

    def admit(self, admission: Admission, sequence: Sequence) -> None:
        self.admissions.append(admission)
        self.admitted.append(sequence)

    def prefills(self) -> list[tuple[int, int]]:
        """(slot, tokens) of each prefill slice so far."""
        return [(slot, count) for slot, (_, count) in self._prefills.items()]

    def columns(self) -> tuple[IndexArray, Int32Array, Int32Array]:
        """slot, start and count of all slices, decodes first; empty counts mean one each."""
        if not self._prefills:
            return self._decode_slot, self._decode_start, NO_INT32
        ones = np.ones(self.num_decode, dtype=np.int32)
        slots = np.array(list(self._prefills), dtype=np.intp)
        starts = int32([start for start, _ in self._prefills.values()])
        counts = int32([count for _, count in self._prefills.values()])
        return (
            np.concatenate([self._decode_slot, slots]),
            np.concatenate([self._decode_start, starts]),
            np.concatenate([ones, counts]),
        )
