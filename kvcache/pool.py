"""Which KV blocks of one worker group are idle and which are held.

The pool only counts: a block is an integer here, and the tensors it names live in
`worker.kv_store`. Invariant (see `kvcache.checks`): a block is idle exactly when
nobody holds it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kvcache.errors import OutOfBlocks


class BlockPool:
    """Reference counts over `num_blocks` ids, and the idle ones in the order of their reuse.

    Idle blocks that hold nothing reusable are taken first, then the longest idle.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._holders = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        """Idle ones that hold nothing reusable; the last one is the next to go."""
        self._reusable: OrderedDict[int, None] = OrderedDict()
        """Idle ones that do, longest idle first."""

    @property
    def num_idle(self) -> int:
        return len(self._blank) + len(self._reusable)

    @property
    def num_blank(self) -> int:
        """Idle blocks that hold nothing reusable; they are taken first."""
        return len(self._blank)

    def idle(self) -> list[int]:
        """In the order of their reuse."""
        return [*reversed(self._blank), *self._reusable]

    def holders(self, block: int) -> int:
        return self._holders[block]

    def take(self, count: int) -> list[int]:
        """Hold `count` idle blocks, in the order of reuse.

        Raises:
            OutOfBlocks: fewer than `count` are idle; nothing was taken.
        """
        if count > self.num_idle:
            raise OutOfBlocks(wanted=count, idle=self.num_idle, total=self.num_blocks)
        kept = max(0, len(self._blank) - count)
        blocks = self._blank[kept:][::-1]
        del self._blank[kept:]
        pop = self._reusable.popitem
        blocks += [pop(last=False)[0] for _ in range(count - len(blocks))]
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one holder to each block; an idle block (a prefix hit) is idle no more."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._reusable[block]
            self._holders[block] += 1

    def give_back(self, blocks: Sequence[int], is_reusable: Callable[[int], bool]) -> None:
        """Drop one holder of each block, last block first.

        A cached prefix is only usable from its start, so its tail must idle longest
        and be reused first. Blocks that are not `is_reusable` go before all others.
        """
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} given back but not held"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if is_reusable(block):
                    self._reusable[block] = None
                else:
                    self._blank.append(block)
