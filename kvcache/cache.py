"""The KV cache of one worker group as the scheduler uses it: match, admit, extend, release.

Joins the pool (who holds what), the prefix index (what can be reused) and the tables (which
blocks a slot has). It never touches K/V itself.

A plan that was dispatched cannot be taken back, so blocks released while plans are
unanswered stay in limbo, held by nobody's table, until the last plan that may write them is
answered; only then can they be handed out again.
"""

from collections import deque
from collections.abc import KeysView, Sequence

import numpy as np

from kvcache.pool import BlockPool
from kvcache.prefix import PrefixIndex
from kvcache.table import BlockTables, IndexArray, Int32Array


class KVCache:
    """Blocks of `block_size` tokens, shared where full prefixes are equal."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        max_blocks_per_slot: int,
        reuses_prefixes: bool = True,
    ) -> None:
        self.block_size = block_size
        self.reuses_prefixes = reuses_prefixes
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(num_blocks)
        self.tables = BlockTables(num_slots, max_blocks_per_slot)
        self._limbo: deque[tuple[int, list[int]]] = deque()
        self._num_limbo = 0
        self.withheld: list[int] = []
        """Blocks that nobody uses and nobody may have."""

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_idle(self) -> int:
        return self.pool.num_idle

    @property
    def num_limbo(self) -> int:
        """Blocks that no sequence wants but an unanswered plan may still write (upper bound:
        a block shared by two released sequences counts twice)."""
        return self._num_limbo

    def limbo(self) -> list[tuple[int, list[int]]]:
        """Fences and blocks, for `kvcache.checks`."""
        return list(self._limbo)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest reusable prefix of `keys`; not held until `admit`."""
        return self.index.longest_match(keys) if self.reuses_prefixes else []

    @property
    def held_keys(self) -> KeysView[bytes]:
        """Keys of all full blocks that a sequence could start with, or go on with."""
        return self.index.keys

    def num_needed(self, cached: Sequence[int], num_tokens: int) -> int:
        """Idle blocks that `admit` would use up, prefix hits that idle now included."""
        revived = sum(1 for block in cached if self.pool.holders(block) == 0)
        return self.blocks_for(num_tokens) - len(cached) + revived

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def admit(self, slot: int, cached: Sequence[int], num_tokens: int) -> list[int]:
        """Give the slot blocks for `num_tokens`: the `cached` ones first, then new ones.

        Raises:
            OutOfBlocks: not enough idle blocks; nothing was taken.
        """
        self.pool.share(cached)
        try:
            fresh = self._take(self.blocks_for(num_tokens) - len(cached))
        except Exception:
            self.pool.give_back(cached, self.index.holds)
            raise
        blocks = [*cached, *fresh]
        self.tables.assign(slot, blocks)
        return blocks

    def extend(self, slots: IndexArray) -> Int32Array:
        """Append one new block to each slot's table; returns these blocks.

        Raises:
            OutOfBlocks: not enough idle blocks; nothing was taken.
        """
        blocks = np.array(self._take(len(slots)), dtype=np.int32)
        self.tables.append_each(slots, blocks)
        return blocks

    def commit(self, slot: int, first: int, keys: Sequence[bytes]) -> None:
        """The slot's blocks from number `first` on hold the prefixes `keys` before any later
        plan runs."""
        if self.reuses_prefixes:
            blocks = self.tables.rows[slot, first : first + len(keys)].tolist()
            self.index.add(keys, blocks)

    def commit_each(self, slots: IndexArray, indices: Int32Array, keys: Sequence[bytes]) -> None:
        """Block `indices[i]` of `slots[i]` holds the prefix `keys[i]`."""
        self.index.add(keys, self.tables.rows[slots, indices].tolist())

    def release(self, slot: int, fence: int | None) -> None:
        """The slot's sequence is gone. Its blocks idle once plan `fence` is answered.

        `fence` is the last dispatched step that may write them; None: all are answered.
        """
        blocks: list[int] = self.tables.of(slot).tolist()
        self.tables.clear(slot)
        if fence is None:
            self.pool.give_back(blocks, self.index.holds)
        else:
            assert not self._limbo or self._limbo[-1][0] <= fence, "fences must rise"
            self._limbo.append((fence, blocks))
            self._num_limbo += len(blocks)

    def answered(self, step: int) -> None:
        """Plan `step` was answered: blocks in limbo behind it idle now."""
        while self._limbo and self._limbo[0][0] <= step:
            blocks = self._limbo.popleft()[1]
            self._num_limbo -= len(blocks)
            self.pool.give_back(blocks, self.index.holds)

    def withhold(self) -> int:
        """Let nobody have the blocks that idle now, until `restore`; how many they are."""
        blocks = self._take(self.num_idle)
        self.withheld += blocks
        return len(blocks)

    def restore(self) -> None:
        """Let all that was withheld idle again."""
        self.pool.give_back(self.withheld, self.index.holds)
        self.withheld.clear()

    def _take(self, count: int) -> list[int]:
        num_blank = self.pool.num_blank
        blocks = self.pool.take(count)
        self.index.forget(blocks[num_blank:])
        return blocks
