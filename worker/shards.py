"""How a model is dealt out to the tensor-parallel ranks of one worker group.

A rank holds whole KV-head groups (a KV head with the query heads that read it), some of the
MLP's columns and some of the vocabulary's rows, each dealt out as evenly as it goes, so a
tensor-parallel size need not divide anything. Only integers here; the tensors that are cut
by them live in `worker.weights`. Invariant: the spans of all ranks, in rank order, cover
everything without a gap, and overlap only where KV heads are replicated.
"""

import itertools
from dataclasses import dataclass

ALIGNMENT = 16
"""Columns and rows are dealt in runs of this many, so that every shard of a 16-bit weight
starts on a 32-byte border and its inner loops have no ragged end."""

FINE_RUNS = 16
"""Runs per rank from which on dealing whole runs costs little: at most one in this many."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive indices [start, stop)."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def as_slice(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWidths:
    """What of a model is dealt out: the whole model's numbers."""

    num_q_heads: int
    num_kv_heads: int
    mlp_columns: int
    vocab_rows: int

    def __post_init__(self) -> None:
        smallest = min(self.num_q_heads, self.num_kv_heads, self.mlp_columns, self.vocab_rows)
        if smallest < 1:
            raise ValueError(f"every width of a model must be at least 1, got {self}")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_q_heads} query heads cannot share {self.num_kv_heads} KV heads "
                "evenly: the first must be a multiple of the second"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one rank of `size` holds.

    Query heads are those that read this rank's KV heads, so attention needs no other rank:
    `q_heads.size / kv_heads.size` is the same whole number on every rank, or, where KV heads
    are replicated, `q_heads` is this rank's part of its only KV head's group.
    """

    rank: int
    size: int
    q_heads: Span
    kv_heads: Span
    mlp_columns: Span
    vocab_rows: Span


class ImpossibleShards(ValueError):
    """The model cannot be dealt out to this many ranks; `legal_sizes` are those that work."""

    def __init__(self, widths: ModelWidths, size: int, legal_sizes: tuple[int, ...]) -> None:
        super().__init__(
            f"tensor_parallel_size={size} does not fit this model of {widths.num_q_heads} query "
            f"heads, {widths.num_kv_heads} KV heads, {widths.mlp_columns} MLP columns and "
            f"{widths.vocab_rows} vocabulary rows. Any size up to the number of KV heads works, "
            "beyond it one that is a multiple of the KV heads and divides the query heads. "
            f"Set tensor_parallel_size to one of {', '.join(map(str, legal_sizes))}."
        )
        self.size, self.legal_sizes = size, legal_sizes


def deal(count: int, num_hands: int) -> tuple[Span, ...]:
    """Deal `count` things to `num_hands`, in order; the first hands get one more if need be."""
    base, extra = divmod(count, num_hands)
    starts = [hand * base + min(hand, extra) for hand in range(num_hands + 1)]
    return tuple(Span(start, stop) for start, stop in itertools.pairwise(starts))


def deal_aligned(count: int, num_hands: int) -> tuple[Span, ...]:
    """`deal`, in whole runs of `ALIGNMENT` where there are enough; the last hand gets the rest."""
    num_runs = count // ALIGNMENT
    if num_runs < FINE_RUNS * num_hands:
        return deal(count, num_hands)
    spans = [Span(s.start * ALIGNMENT, s.stop * ALIGNMENT) for s in deal(num_runs, num_hands)]
    spans[-1] = Span(spans[-1].start, count)
    return tuple(spans)


def legal_sizes(widths: ModelWidths) -> tuple[int, ...]:
    """Every tensor-parallel size that works for such a model, ascending. 1 always does."""
    most = min(widths.num_q_heads, widths.mlp_columns, widths.vocab_rows)
    return tuple(
        size
        for size in range(1, most + 1)
        if size <= widths.num_kv_heads
        or (size % widths.num_kv_heads == 0 and widths.num_q_heads % size == 0)
    )


def deal_shards(widths: ModelWidths, size: int) -> tuple[Shard, ...]:
    """The shard of each of `size` ranks, in rank order.

    Raises:
        ImpossibleShards: `size` is none of `legal_sizes(widths)`.
    """
    legal = legal_sizes(widths)
    if size not in legal:
        raise ImpossibleShards(widths, size, legal)
    heads = _deal_heads(widths, size)
    columns = deal_aligned(widths.mlp_columns, size)
    rows = deal_aligned(widths.vocab_rows, size)
    return tuple(
        Shard(
            rank=rank,
            size=size,
            q_heads=heads[rank][0],
            kv_heads=heads[rank][1],
            mlp_columns=columns[rank],
            vocab_rows=rows[rank],
        )
        for rank in range(size)
    )


def _deal_heads(widths: ModelWidths, size: int) -> list[tuple[Span, Span]]:
    """Query heads and KV heads of each rank."""
    if size <= widths.num_kv_heads:
        group = widths.num_q_heads // widths.num_kv_heads
        dealt = deal(widths.num_kv_heads, size)
        return [(Span(kv.start * group, kv.stop * group), kv) for kv in dealt]
    replicas = size // widths.num_kv_heads
    return [
        (q, Span(rank // replicas, rank // replicas + 1))
        for rank, q in enumerate(deal(widths.num_q_heads, size))
    ]
