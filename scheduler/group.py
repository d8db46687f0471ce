"""One worker group as the scheduler sees it: its running sequences, its cache, its plans.

A group is one replica of the model. It knows nothing of the queue or of other groups; the
scheduler tells it whom to admit. Plans are answered in order; at most a few are unanswered.
"""

import zlib
from collections import deque
from dataclasses import dataclass

import numpy as np

from kvcache.cache import KVCache
from kvcache.keys import next_keys
from scheduler.arrays import (
    NO_BOOL,
    NO_INDEX,
    NO_INT32,
    BoolArray,
    Float64Array,
    IndexArray,
    Int32Array,
    Int64Array,
    int32,
)
from scheduler.budget import StepTime
from scheduler.config import SchedulerConfig
from scheduler.draft import StepDraft
from scheduler.errors import ProtocolError
from scheduler.plan import Admission, StepPlan, StepResult
from scheduler.sequences import RunningColumns, Sequence

_LEAST_GROWTH = 0.05


@dataclass(frozen=True, slots=True)
class Issued:
    """What the core remembers of a plan until it is answered. Columns are [S]."""

    step: int
    slot: IndexArray
    serial: Int64Array
    end: Int32Array
    """Position after the slice."""
    samples: BoolArray
    num_samples: int
    grown: IndexArray
    """Slots that got a new block, since the one before it is full."""
    prompts: list[tuple[Sequence, int]]
    """Sequences that have no token yet, with the tokens of their slices."""
    num_tokens: int
    num_decode: int
    """Of these, one each of running streams."""


class Group:
    """Running sequences in slots, their blocks, and the plans in flight."""

    def __init__(
        self,
        *,
        group_id: int,
        epoch: int,
        num_blocks: int,
        config: SchedulerConfig,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        self.group_id, self.epoch = group_id, epoch
        self.block_size = config.block_size
        self.num_stages = config.num_stages
        self.max_len = min(max_model_len, num_blocks * config.block_size)
        self.cache = KVCache(
            num_blocks=num_blocks,
            block_size=config.block_size,
            num_slots=config.max_num_seqs,
            max_blocks_per_slot=-(-self.max_len // config.block_size),
            reuses_prefixes=config.enable_prefix_caching,
        )
        self.running = RunningColumns(config.max_num_seqs, self.max_len, vocab_size)
        self.unanswered: deque[Issued] = deque()
        self.leaving: dict[int, tuple[int, Sequence]] = {}
        """Preempted sequences by serial, each with the step whose answer they wait for."""
        self.step = 0
        self.step_time = StepTime()
        self.peak_blocks = 0
        self.growth_share = _LEAST_GROWTH
        """Share of the running sequences' possible growth that admission leaves blocks for;
        preemptions raise it, finished sequences let it fall."""
        self.is_draining = False
        """Whether it starts nothing new: it is going to leave."""
        self.is_short_of_blocks = False
        """Whether a waiting sequence lacked blocks when the last step was planned."""
        self._released: list[int] = []
        self._coming: dict[int, frozenset[bytes]] = {}
        """By slot: keys of prompt blocks that it is going to compute."""

    @property
    def num_running(self) -> int:
        return len(self.running.order)

    @property
    def sequences(self) -> list[Sequence]:
        """Those that run, and preempted ones whose last answers are awaited."""
        return self.running.in_order() + [sequence for _, sequence in self.leaving.values()]

    @property
    def load(self) -> int:
        """Tokens that the running sequences would compute next."""
        rows = self.running
        return int((rows.known[rows.order] - rows.planned[rows.order]).sum())

    @property
    def backlog(self) -> int:
        """Tokens of running sequences that are not computed yet, those in flight included."""
        return self.load + sum(issued.num_tokens for issued in self.unanswered)

    def certain_ends(self) -> Float64Array:
        """In how many seconds each running sequence reaches its limit, if none ends before."""
        rows = self.running
        left = (rows.limit[rows.order] - rows.known[rows.order]).astype(np.float64)
        return left * self.step_time.mean_s * self.num_stages

    def due(self) -> tuple[IndexArray, IndexArray]:
        """Running slots that lack one token, and those that lack more, first to go first.

        The last token before a sequence's limit is never computed: nothing follows it.
        """
        if self.num_stages > 1:
            return self._due_in_stages()
        rows = self.running
        slots = rows.order
        todo = np.minimum(rows.known.take(slots), rows.fixed(slots).limit - 1)
        todo -= rows.planned.take(slots)
        lacks_one = todo == 1
        if np.count_nonzero(lacks_one) == len(slots):
            return slots, NO_INDEX
        return slots[lacks_one], slots[todo > 1]

    def _due_in_stages(self) -> tuple[IndexArray, IndexArray]:
        """The same where the first stage never learns what the last one has sampled, unless a plan
        says so: what a sequence lacks is what the core knows, and its next token must have come.

        Streams are dealt to as many plans as there are stages: at most that many have some, and
        none has more than its share, of all streams and of those that are due.
        """
        rows = self.running
        slots = rows.order
        todo = np.minimum(rows.confirmed.take(slots), rows.fixed(slots).limit - 1)
        todo -= rows.planned.take(slots)
        streams = slots[todo == 1]
        if len(streams):
            left = self.num_stages - sum(issued.num_decode > 0 for issued in self.unanswered)
            num_streams = int(np.count_nonzero(todo <= 1))
            share = min(-(-num_streams // self.num_stages), -(-len(streams) // max(1, left)))
            streams = streams[: share if left > 0 else 0]
        return streams, slots[todo > 1]

    @property
    def growth(self) -> int:
        """Tokens by which the running sequences may outgrow their blocks."""
        rows = self.running
        return int(np.maximum(rows.limit[rows.order] - rows.capacity[rows.order], 0).sum())

    def decode(self, draft: StepDraft, slots: IndexArray) -> list[Sequence]:
        """Plan one token for each slot; returns the sequences preempted to make room.

        Slots that must wait for blocks in limbo sit this step out.
        """
        rows = self.running
        starts = rows.planned.take(slots)
        needy = starts >= rows.capacity.take(slots)
        preempted: list[Sequence] = []
        if np.count_nonzero(needy):
            short = slots[needy]
            if len(short) > self.cache.num_idle:
                preempted = self._make_room(short)
                alive = rows.serial[slots] >= 0
                slots, needy = slots[alive], needy[alive]
                waits = needy.nonzero()[0][self.cache.num_idle :]
                slots, needy = np.delete(slots, waits), np.delete(needy, waits)
                short, starts = slots[needy], rows.planned.take(slots)
            if len(short):
                draft.grow(short, self.cache.extend(short))
                rows.capacity[short] += self.block_size
        draft.decode(slots, starts)
        return preempted

    def prefill(self, draft: StepDraft, slot: int, count: int) -> None:
        """Plan the next `count` uncomputed tokens of a slot that has blocks for them.

        Their full blocks can be shared at once: a later plan runs after this one, and within
        one step K/V of all slices are written before any is read.
        """
        end = draft.prefill(slot, int(self.running.planned[slot]), count)
        self._commit(slot, end)
        if end // self.block_size == self.running.num_admitted[slot] // self.block_size:
            self._coming.pop(slot, None)

    def _commit(self, slot: int, length: int) -> None:
        """Name the full blocks among the first `length` tokens in the prefix index."""
        rows = self.running
        first, last = int(rows.committed[slot]) // self.block_size, length // self.block_size
        if last <= first or not self.cache.reuses_prefixes:
            return
        sequence = rows.at(slot)
        sequence.extend_keys(rows.tokens[slot, : last * self.block_size], self.block_size)
        self.cache.commit(slot, first, sequence.keys[first:last])
        rows.committed[slot], rows.key[slot] = last * self.block_size, sequence.keys[last - 1]

    def _commit_next(self, slots: IndexArray) -> None:
        """Name the next full block of each of these slots, whose tokens are known by now.

        Those of prompts were named when they were planned, unless one token was left of it.
        """
        rows, size = self.running, self.block_size
        ends = rows.committed[slots] + size
        is_full = ends < rows.confirmed[slots]
        slots, ends = slots[is_full], ends[is_full]
        keys = next_keys(rows.key[slots], rows.tokens, slots, ends, size)
        self.cache.commit_each(slots, ends // size - 1, keys.tolist())
        rows.committed[slots], rows.key[slots] = ends, keys
        if self._coming:
            for slot in slots.tolist():
                self._coming.pop(slot, None)

    def match(self, sequence: Sequence) -> list[int]:
        """Cached blocks that the sequence could start with; its last token is never cached."""
        if not (self.cache.reuses_prefixes and sequence.reads_cache):
            return []
        sequence.extend_keys(sequence.tokens, self.block_size)
        return self.cache.match(sequence.keys[: (len(sequence.tokens) - 1) // self.block_size])

    def computes_soon(self, sequence: Sequence, cached: list[int]) -> bool:
        """Whether a running sequence is about to compute the block after `cached`."""
        if not (self._coming and sequence.reads_cache):
            return False
        at = len(cached)
        usable = (len(sequence.tokens) - 1) // self.block_size
        return at < usable and any(sequence.keys[at] in keys for keys in self._coming.values())

    def admit(self, draft: StepDraft, sequence: Sequence, cached: list[int], count: int) -> None:
        """Give the sequence a slot and blocks for all its tokens; plan its first slice."""
        num_cached = len(cached) * self.block_size
        num_tokens = len(sequence.tokens)
        blocks = -(-num_tokens // self.block_size)
        key = sequence.keys[len(cached) - 1] if cached else sequence.root_key
        slot = self.running.admit(sequence, num_cached, blocks * self.block_size, key)
        self.cache.admit(slot, cached, num_tokens)
        sequence.slot, sequence.group_id = slot, self.group_id
        sampling = sequence.request.sampling
        draft.admit(
            Admission(
                slot=slot,
                sampling=sampling,
                num_prompt=sequence.num_prompt,
                blocks=self.cache.tables.of(slot).copy(),
                num_cached=num_cached,
                end_ids=sequence.request.end_ids,
                history=sequence.tokens[:num_cached] if sampling.needs_history else NO_INT32,
            ),
            sequence,
        )
        if self.cache.reuses_prefixes and num_cached + count < num_tokens:
            # others that share its prompt shall wait for it
            sequence.extend_keys(sequence.tokens, self.block_size)
            self._coming[slot] = frozenset(sequence.keys[len(cached) :])
        self.prefill(draft, slot, count)

    def leave(self, slot: int) -> Sequence:
        """Take the sequence out of its slot; its blocks idle when no plan can write them."""
        rows = self.running
        sequence = rows.at(slot)
        self._commit(slot, int(min(rows.planned[slot], rows.confirmed[slot])))
        rows.leave(slot)
        self._coming.pop(slot, None)
        self.cache.release(slot, self.step if self.unanswered else None)
        self._released.append(slot)
        sequence.slot = -1
        return sequence

    def preempt(self, slot: int) -> Sequence:
        """Like `leave`, for a sequence that comes back: its tokens in flight are awaited."""
        sequence = self.leave(slot)
        sequence.num_preemptions += 1
        self.growth_share = min(1.0, 2 * self.growth_share + 0.1)
        if self.unanswered:
            self.leaving[sequence.serial] = (self.step, sequence)
        else:
            sequence.group_id = None
        return sequence

    def finish(self, slot: int) -> None:
        """Like `leave`, for a sequence that ended by itself."""
        self.leave(slot)
        self.growth_share = max(_LEAST_GROWTH, 0.95 * self.growth_share)

    def _make_room(self, short: IndexArray) -> list[Sequence]:
        """Preempt last ones until the blocks coming free suffice for the others of `short`."""
        preempted = []
        rows = self.running
        wanting = set(short.tolist())
        while len(wanting) > self.cache.num_idle + self.cache.num_limbo and len(rows.order) > 1:
            victim = int(rows.order[-1])
            wanting.discard(victim)
            preempted.append(self.preempt(victim))
        return preempted

    def dispatch(self, draft: StepDraft) -> StepPlan:
        """Turn the draft into the next plan and remember it until it is answered."""
        rows = self.running
        slot, start, count = draft.columns()
        end = start + (count if len(count) else 1)
        known = rows.known.take(slot)
        samples = end == known
        num_samples = int(np.count_nonzero(samples))
        fixed = rows.fixed(slot)
        given = NO_INT32
        if self.num_stages > 1:
            given = end - start
        elif np.count_nonzero(start < fixed.num_admitted):
            given = np.minimum(np.maximum(fixed.num_admitted - start, 0), end - start)
        self.step += 1
        self.unanswered.append(
            Issued(
                step=self.step,
                slot=slot,
                serial=fixed.serial,
                end=end,
                samples=samples,
                num_samples=num_samples,
                grown=draft.grown,
                prompts=[
                    (sequence, tokens)
                    for prompt_slot, tokens in draft.prefills()
                    if (sequence := rows.at(prompt_slot)).first_token_at is None
                ],
                num_tokens=draft.num_tokens,
                num_decode=draft.num_decode,
            )
        )
        plan = StepPlan(
            epoch=self.epoch,
            step=self.step,
            released=int32(self._released) if self._released else NO_INT32,
            admitted=tuple(draft.admissions),
            block_slot=int32(draft.grown),
            block=draft.block,
            slot=int32(slot),
            start=start,
            count=count,
            samples=NO_BOOL if num_samples == len(slot) else samples,
            given=given,
            token=rows.tokens_at(slot, start, given) if len(given) else NO_INT32,
        )
        self._released = []
        rows.planned[slot] = end
        rows.known[slot] = known + samples
        self.peak_blocks = max(self.peak_blocks, self.cache.num_blocks - self.cache.num_idle)
        return plan

    def settle(self, result: StepResult) -> tuple[Issued, BoolArray | None]:
        """The oldest unanswered plan is answered; what it computed counts from now on.

        Returns the plan, and which of its slices' sequences still run in their slots; None: all.

        Raises:
            ProtocolError: the result answers another plan, or has another number of tokens.
        """
        expected = self.unanswered[0].step if self.unanswered else None
        if result.step != expected:
            raise ProtocolError(
                f"group {self.group_id} answered step {result.step}, expected {expected}"
            )
        issued = self.unanswered[0]
        if len(result.token) != issued.num_samples:
            raise ProtocolError(
                f"group {self.group_id} answered step {result.step} with {len(result.token)} "
                f"tokens, {issued.num_samples} slices sample"
            )
        self.unanswered.popleft()
        self.cache.answered(issued.step)
        self.step_time.learn(issued.num_tokens, result.compute_s)
        rows = self.running
        runs: BoolArray | None = None
        grown = issued.grown
        if issued.slot is not rows.order:  # else nobody came or left
            runs = rows.serial.take(issued.slot) == issued.serial
            if np.count_nonzero(runs) == len(runs):
                runs = None
            elif len(grown):
                grown = np.intersect1d(grown, issued.slot[runs], assume_unique=True)
        if len(grown) and self.cache.reuses_prefixes:
            self._commit_next(grown)
        return issued, runs

    def returned(self) -> list[Sequence]:
        """Preempted sequences for which no answer is outstanding any more."""
        last = self.unanswered[0].step - 1 if self.unanswered else self.step
        back = [item for fence, item in self.leaving.values() if fence <= last]
        for sequence in back:
            del self.leaving[sequence.serial]
            sequence.group_id = None
        return back


def checksum(plan: StepPlan) -> int:
    """CRC-32 over the plan's columns, to tell whether a replay planned the same."""
    crc = 0
    columns = [plan.released, plan.block_slot, plan.block, plan.slot, plan.start, plan.count]
    columns += [plan.given, plan.token] + [admission.blocks for admission in plan.admitted]
    for column in columns:
        crc = zlib.crc32(column.data, crc)
    return zlib.crc32(plan.samples.data, crc)
