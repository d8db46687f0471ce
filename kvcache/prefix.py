"""Which blocks hold the K/V of which prefixes, by the keys of `kvcache.keys`."""

from collections.abc import Iterable, KeysView, Sequence


class PrefixIndex:
    """Keys of the blocks whose content can be reused, one block per key."""

    def __init__(self, num_blocks: int) -> None:
        self._block_by_key: dict[bytes, int] = {}
        self._key_by_block: list[bytes | None] = [None] * num_blocks

    def __len__(self) -> int:
        return len(self._block_by_key)

    @property
    def keys(self) -> KeysView[bytes]:
        """Of all prefixes that are held; it follows what is added and forgotten."""
        return self._block_by_key.keys()

    def holds(self, block: int) -> bool:
        """Whether the block's content can be found by a key."""
        return self._key_by_block[block] is not None

    def add(self, keys: Sequence[bytes], blocks: list[int]) -> None:
        """Remember which block holds which prefix; a key that has a block keeps it."""
        assert len(keys) == len(blocks)
        kept = list(map(self._block_by_key.setdefault, keys, blocks))
        key_by_block = self._key_by_block
        if kept == blocks:
            for block, key in zip(blocks, keys, strict=True):
                key_by_block[block] = key
            return
        for key, block, its_block in zip(keys, blocks, kept, strict=True):
            if its_block == block:
                key_by_block[block] = key

    def forget(self, blocks: Iterable[int]) -> None:
        """The blocks are about to be overwritten."""
        key_by_block, block_by_key = self._key_by_block, self._block_by_key
        for block in blocks:
            key = key_by_block[block]
            if key is not None:
                key_by_block[block] = None
                del block_by_key[key]

    def longest_match(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest prefix of `keys` that is held."""
        blocks = []
        for key in keys:
            block = self._block_by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks
