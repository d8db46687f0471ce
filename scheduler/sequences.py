"""A sequence as the core sees it, and the columns of the running ones.

The core is the only truth about a request: its tokens, where it stands, when it must end.
While it runs, what changes every step lives in columns, one row per slot, so that a steady
step needs no loop over sequences. Invariants of a running row (see `scheduler.checks`):

    planned < known, unless the row only waits for its last token
    confirmed <= known <= confirmed + plans in flight
"""

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from kvcache.keys import KEY, KeyArray, chain_keys, root_key
from scheduler.arrays import (
    NO_INDEX,
    BoolArray,
    Float64Array,
    IndexArray,
    Int32Array,
    Int64Array,
)
from scheduler.request import Request

_CACHE_LINE = 16
"""In tokens."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request and all that the core knows of it."""

    serial: int
    client: int
    request: Request
    arrival: float
    sort_key: tuple[float, int]
    """Smaller goes first, in the queue and in a step; it never changes."""
    limit: int
    """Length at which it ends by `Finish.LENGTH`."""
    end_ids: frozenset[int]
    """Tokens that end it."""
    tokens: Int32Array
    """Prompt and confirmed output, while it waits; stale while it runs."""
    keys: list[bytes] = field(default_factory=list)
    """Keys of its full blocks, as far as they were needed; while it runs, without its output."""
    group_id: int | None = None
    """The group it runs in; None while it waits."""
    slot: int = -1
    awaiting: int = 0
    """Answers still to come for plans made before it was preempted."""
    num_bypasses: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache when it first started."""
    started_at: float | None = None
    first_token_at: float | None = None
    chunks: list[tuple[int, float]] = field(default_factory=list)
    """Parts of its prompt until its first token: how many tokens, and when they were answered."""
    last_token_at: float = math.nan
    """Before it runs (again); NaN: it has no token yet."""
    num_reported: int = 0
    """Prompt positions whose log-probabilities were sent."""

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def reads_cache(self) -> bool:
        """Prompt log-probabilities need every position computed."""
        return self.request.sampling.prompt_logprobs is None

    @property
    def root_key(self) -> bytes:
        """The parent of its first block's key."""
        return root_key(self.request.cache_salt)

    def extend_keys(self, tokens: Int32Array, block_size: int) -> None:
        """Make `keys` cover every full block of `tokens`."""
        done = len(self.keys)
        if len(tokens) // block_size > done:
            parent = self.keys[-1] if done else self.root_key
            self.keys += chain_keys(parent, tokens[done * block_size :], block_size)


@dataclass(frozen=True, slots=True)
class FixedColumns:
    """What does not change about some rows while they run, gathered: [N] each."""

    serial: Int64Array
    client: Int32Array
    handle: Int32Array
    num_admitted: Int32Array
    limit: Int32Array
    offset: IndexArray
    """Where each row begins in the token log."""


class RunningColumns:
    """The running sequences of one group, one row per slot; `order` lists the rows in use."""

    def __init__(self, num_slots: int, max_len: int, vocab_size: int) -> None:
        def column() -> Int32Array:
            return np.zeros(num_slots, dtype=np.int32)

        self._width = (max_len // _CACHE_LINE + 1 | 1) * _CACHE_LINE
        self.tokens: Int32Array = np.empty((num_slots, self._width), dtype=np.int32)
        """Token log. Positions at and beyond `confirmed` mean nothing. Rows are an odd number of
        cache lines long, or a step's tokens, often at like positions, would share few places of
        the cache."""
        self._flat_tokens = self.tokens.reshape(-1)
        self.num_admitted = column()
        """Tokens known at admission; the group itself sampled the ones after."""
        self.confirmed = column()
        """Tokens whose values the core knows."""
        self.known = column()
        """Tokens that exist, those being sampled by plans in flight included."""
        self.planned = column()
        """Tokens whose K/V are in the pool once every plan in flight has run."""
        self.committed = column()
        """Tokens in full blocks whose keys are in the prefix index."""
        self.key: KeyArray = np.zeros(num_slots, dtype=KEY)
        """Of the last of these blocks; before the first one, its parent."""
        self.capacity = column()
        """Tokens for which the row has blocks."""
        self.limit = column()
        self.may_end: BoolArray = np.zeros(vocab_size, dtype=np.bool_)
        """By token: whether it ends any of the sequences."""
        self._num_ending: Counter[int] = Counter()
        """How many it ends."""
        self.client = column()
        self.handle = column()
        self.token_at: Float64Array = np.empty(num_slots)
        """When the last token came; NaN before the first one."""
        self.serial: Int64Array = np.full(num_slots, -1, dtype=np.int64)
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.order: IndexArray = NO_INDEX
        """Never changed in place."""
        self._free = list(range(num_slots - 1, -1, -1))
        self._fixed_of: IndexArray = NO_INDEX
        self._fixed = self._gather(NO_INDEX)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def at(self, slot: int) -> Sequence:
        sequence = self.sequences[slot]
        assert sequence is not None, f"slot {slot} is empty"
        return sequence

    def in_order(self) -> list[Sequence]:
        return [self.at(slot) for slot in self.order.tolist()]

    def admit(self, sequence: Sequence, num_cached: int, capacity: int, key: bytes) -> int:
        """Give the sequence a slot, whose row starts with `num_cached` tokens computed.

        `key` is that of the last of these, or of none.
        """
        slot = self._free.pop()
        num_tokens = len(sequence.tokens)
        self.tokens[slot, :num_tokens] = sequence.tokens
        for column in (self.num_admitted, self.confirmed, self.known):
            column[slot] = num_tokens
        self.planned[slot] = num_cached
        self.committed[slot] = num_cached
        self.key[slot] = key
        self.capacity[slot] = capacity
        self.limit[slot] = sequence.limit
        for token in sequence.end_ids:
            self.may_end[token] = True
            self._num_ending[token] += 1
        self.client[slot] = sequence.client
        self.handle[slot] = sequence.request.handle
        self.token_at[slot] = sequence.last_token_at
        self.serial[slot] = sequence.serial
        self.sequences[slot] = sequence
        self._insert(slot, sequence)
        return slot

    def fixed(self, slots: IndexArray) -> FixedColumns:
        """Of rows in use; of the same array as the last time, as in steady steps, for nothing."""
        if slots is not self._fixed_of:
            self._fixed_of, self._fixed = slots, self._gather(slots)
        return self._fixed

    def _gather(self, slots: IndexArray) -> FixedColumns:
        return FixedColumns(
            serial=self.serial.take(slots),
            client=self.client.take(slots),
            handle=self.handle.take(slots),
            num_admitted=self.num_admitted.take(slots),
            limit=self.limit.take(slots),
            offset=slots * self._width,
        )

    def store(self, slots: IndexArray, positions: Int32Array, tokens: Int32Array) -> None:
        """One token for each of the slots, at positions of their own."""
        self._flat_tokens[self.fixed(slots).offset + positions] = tokens

    def tokens_at(self, slots: IndexArray, starts: Int32Array, counts: Int32Array) -> Int32Array:
        """So many consecutive tokens of each of the slots, slot after slot."""
        ends = np.cumsum(counts)
        shift = self.fixed(slots).offset + starts - (ends - counts)
        found: Int32Array = self._flat_tokens[np.arange(ends[-1]) + np.repeat(shift, counts)]
        return found

    def leave(self, slot: int) -> Sequence:
        """Empty the slot; the sequence takes its confirmed tokens along."""
        sequence = self.at(slot)
        sequence.tokens = self.tokens[slot, : self.confirmed[slot]].copy()
        sequence.last_token_at = float(self.token_at[slot])
        self.sequences[slot] = None
        self.serial[slot] = -1
        self.order = self.order[self.order != slot]
        for token in sequence.end_ids:
            self._num_ending[token] -= 1
            if not self._num_ending[token]:
                del self._num_ending[token]
                self.may_end[token] = False
        self._free.append(slot)
        return sequence

    def _insert(self, slot: int, sequence: Sequence) -> None:
        """Keep `order` sorted by sort key; new ones nearly always belong at the end."""
        at = len(self.order)
        while at and self.at(int(self.order[at - 1])).sort_key > sequence.sort_key:
            at -= 1
        order = np.empty(len(self.order) + 1, dtype=np.intp)
        order[:at], order[at], order[at + 1 :] = self.order[:at], slot, self.order[at:]
        self.order = order
