"""Block tables as columns: slot x index -> block. Core and workers keep equal copies."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
IndexArray = npt.NDArray[np.int32] | npt.NDArray[np.intp]


class BlockTables:
    """The blocks of each running sequence, in the order of their positions.

    `rows[slot, :lengths[slot]]` is valid; the rest of a row is left over and means nothing.
    """

    def __init__(self, num_slots: int, max_blocks: int) -> None:
        self.rows: Int32Array = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self.lengths: Int32Array = np.zeros(num_slots, dtype=np.int32)

    def of(self, slot: int) -> Int32Array:
        """A view of the blocks of one slot."""
        return self.rows[slot, : self.lengths[slot]]

    def assign(self, slot: int, blocks: Sequence[int] | Int32Array) -> None:
        """Start the slot's table with these blocks."""
        self.rows[slot, : len(blocks)] = blocks
        self.lengths[slot] = len(blocks)

    def append_each(self, slots: IndexArray, blocks: Sequence[int] | Int32Array) -> None:
        """Append one block to the table of each slot; slots must differ."""
        lengths = self.lengths[slots]
        self.rows[slots, lengths] = blocks
        self.lengths[slots] = lengths + 1

    def clear(self, slot: int) -> None:
        self.lengths[slot] = 0
