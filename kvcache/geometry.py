"""The shape of one shard's K/V: bytes per block, blocks in a budget."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGeometry:
    """K/V of one rank: in each layer and block [2, block_size, num_kv_heads] heads."""

    num_layers: int
    num_kv_heads: int
    """Of this rank's shard, not of the whole model."""
    head_bytes: int
    """Of one head of one token, as the format holds it."""
    block_size: int
    """Tokens per block."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_bytes", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def token_bytes(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.token_bytes

    def blocks_in(self, budget_bytes: int) -> int:
        """How many whole blocks fit; 0 for a budget below one block, also a negative one."""
        return max(budget_bytes, 0) // self.block_bytes

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold this many tokens of one sequence."""
        return blocks_for(num_tokens, self.block_size)

    def bytes_for(self, num_tokens: int) -> int:
        """The least budget that holds one sequence of this many tokens."""
        return self.blocks_for(num_tokens) * self.block_bytes


def blocks_for(num_tokens: int, block_size: int) -> int:
    """`num_tokens` in blocks of `block_size`, rounded up."""
    return -(-num_tokens // block_size)
