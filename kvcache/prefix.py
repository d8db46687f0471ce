"""Which blocks hold the K/V of which prefixes, by the keys of `kvcache.keys`."""

from collections.abc import Iterable, Sequence


class PrefixIndex:
    """Keys of the blocks whose content can be reused, one block per key."""

    def __init__(self) -> None:
        self._block_by_key: dict[bytes, int] = {}
        self._key_by_block: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_by_key)

    def holds(self, block: int) -> bool:
        """Whether the block's content can be found by a key."""
        return block in self._key_by_block

    def add(self, keys: Sequence[bytes], blocks: list[int]) -> None:
        """Remember which block holds which prefix; a key that has a block keeps it."""
        assert len(keys) == len(blocks)
        kept = list(map(self._block_by_key.setdefault, keys, blocks))
        if kept == blocks:
            self._key_by_block.update(zip(blocks, keys, strict=True))
            return
        for key, block, its_block in zip(keys, blocks, kept, strict=True):
            if its_block == block:
                self._key_by_block[block] = key

    def forget(self, blocks: Iterable[int]) -> None:
        """The blocks are about to be overwritten."""
        for block in blocks:
            key = self._key_by_block.pop(block, None)
            if key is not None:
                del self._block_by_key[key]

    def longest_match(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest prefix of `keys` that is held."""
        blocks = []
        for key in keys:
            block = self._block_by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks
