"""From logits to tokens, each row on its own: by its parameters, its past and its number.

The order is: log-probabilities of the raw logits are taken, `worker.edits` (penalties, bias,
bans), temperature, `worker.filters` (min_p, top_k, top_p), and then the first id whose
cumulative probability exceeds the row's random number. That number is a function of (seed,
position), so batch-mates, chunking, preemption and recovery change nothing. On a CPU every
step of it computes each row in the same order of operations whatever else is in the batch,
so the same logits give the same token, bit for bit.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scheduler.arrays import Int32Array, int32
from scheduler.plan import Admission, LogprobRows
from worker import logprobs
from worker.chance import uniform
from worker.edits import SequenceEdits, edit, fallback
from worker.filters import Filters, survivors
from worker.ranking import LARGEST, BadLogits, leaders

NO_LOGPROBS = -1


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The tokens of one step, in the order of the logits' rows."""

    token: Tensor
    """[R] int64, on the device of the logits"""
    logprobs: LogprobRows | None
    """Of the tokens whose sequences asked, by row"""


class Sampler:
    """The sampling parameters of all slots, as columns, and what is kept of their past.

    The columns are on the host: a step gathers the rows it needs and sends those alone.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: str | torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._is_held = np.zeros(max_num_seqs, dtype=np.bool_)
        self._seed = np.zeros(max_num_seqs, dtype=np.int64)
        self._is_greedy = np.ones(max_num_seqs, dtype=np.bool_)
        self._is_filtered = np.zeros(max_num_seqs, dtype=np.bool_)
        self._edited_until = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_logprobs = np.full(max_num_seqs, NO_LOGPROBS, dtype=np.int32)
        self._edits: dict[int, SequenceEdits] = {}
        self._temperature = np.ones(max_num_seqs, dtype=np.float64)
        self._top_k = np.full(max_num_seqs, vocab_size, dtype=np.int64)
        self._top_p = np.ones(max_num_seqs, dtype=np.float64)
        self._min_p = np.zeros(max_num_seqs, dtype=np.float64)

    def admit(self, admission: Admission) -> None:
        """Take over the parameters of the sequence that now has the slot."""
        slot, asked = admission.slot, admission.sampling
        assert not self._is_held[slot], f"slot {slot} is admitted twice"
        assert asked.seed is not None, f"the sequence of slot {slot} has no seed"
        self._is_held[slot] = True
        self._seed[slot] = asked.seed
        self._is_greedy[slot] = asked.is_greedy
        self._num_logprobs[slot] = NO_LOGPROBS if asked.logprobs is None else asked.logprobs
        edits = SequenceEdits(admission)
        self._edited_until[slot] = edits.active_until
        if edits.active_until:
            self._edits[slot] = edits
        if asked.is_greedy:
            return
        top_k = min(asked.top_k or self._vocab_size, self._vocab_size)
        self._is_filtered[slot] = top_k < self._vocab_size or asked.top_p < 1.0 or asked.min_p > 0.0
        self._temperature[slot] = asked.temperature
        self._top_k[slot] = top_k
        self._top_p[slot] = asked.top_p
        self._min_p[slot] = asked.min_p

    def release(self, slot: int) -> None:
        """Forget the sequence that had the slot."""
        assert self._is_held[slot], f"slot {slot} is released but not held"
        self._is_held[slot] = False
        self._is_filtered[slot] = False
        self._edits.pop(slot, None)

    def sample(
        self,
        logits: Tensor,
        slots: Int32Array,
        positions: Int32Array,
        history: Int32Array,
        rows: Int32Array | None = None,
    ) -> SampledRows:
        """Choose one token per row.

        Args:
            logits: [R, V] float32 (or float64), contiguous; left as they are
            slots: [R] admitted slots, each at most once
            positions: [R] that the chosen tokens will have in their sequences
            history: [max_num_seqs, any] the token log; of a slot that needs it, valid below
                the row's position
            rows: [R] what `SampledRows.logprobs.row` calls each row; 0 to R-1 by default

        Raises:
            BadLogits: a row holds NaN or numbers no float32 arithmetic can divide.
        """
        assert logits.shape == (len(slots), self._vocab_size), f"logits are {logits.shape}"
        assert bool(self._is_held[slots].all()), f"some of slots {slots} are not admitted"
        best, token = leaders(logits)
        dead = self._check(best, slots)
        is_edited = positions < self._edited_until[slots]
        is_drawn = ~self._is_greedy[slots] & ~dead
        self._draw(token, logits, np.flatnonzero(is_drawn & ~is_edited), slots, positions)
        if is_edited.any():
            edited_rows = np.flatnonzero(is_edited)
            self._choose_edited(token, logits, edited_rows, slots, positions, history)
        rows = np.arange(len(slots), dtype=np.int32) if rows is None else rows
        return SampledRows(token, self._score(logits, token, slots, positions, rows))

    def _check(self, best: Tensor, slots: Int32Array) -> npt.NDArray[np.bool_]:
        """Refuse rows that cannot be used; return which rows rule out every token."""
        values = best.cpu().numpy()
        dead = np.isneginf(values)
        is_bad = ~(np.abs(values) < LARGEST) & ~dead
        if is_bad.any():
            raise BadLogits(tuple(slots[is_bad].tolist()), tuple(values[is_bad].tolist()))
        return dead

    def _choose_edited(
        self,
        token: Tensor,
        logits: Tensor,
        rows: npt.NDArray[np.int64],
        slots: Int32Array,
        positions: Int32Array,
        history: Int32Array,
    ) -> None:
        """Set `token[rows]`, the rows whose logits are changed before the choice."""
        slots, positions = slots[rows], positions[rows]
        sequences = [self._edits[slot] for slot in slots.tolist()]
        index = self._on_device(rows)
        edited = logits.index_select(0, index)
        edit(edited, sequences, positions.tolist(), [history[slot] for slot in slots])
        best, chosen = leaders(edited)
        dead = self._check(best, slots)
        for row in np.flatnonzero(dead).tolist():
            chosen[row] = fallback(logits[rows[row]], sequences[row].allowed)
        is_drawn = ~self._is_greedy[slots] & ~dead
        self._draw(chosen, edited, np.flatnonzero(is_drawn), slots, positions)
        token[index] = chosen

    def _draw(
        self,
        token: Tensor,
        logits: Tensor,
        rows: npt.NDArray[np.int64],
        slots: Int32Array,
        positions: Int32Array,
    ) -> None:
        """Set `token[rows]` by chance; every such row has a finite largest logit."""
        if not len(rows):
            return
        slots = slots[rows]
        number = self._on_device(uniform(self._seed[slots], positions[rows]))
        index = self._on_device(rows)
        if len(rows) < len(logits):
            logits = logits.index_select(0, index)
        temperature = self._on_device(self._temperature[slots]).to(logits.dtype)
        probability = torch.softmax(logits / temperature[:, None], dim=-1)

        is_filtered = self._is_filtered[slots]
        if not is_filtered.all():
            plain = self._on_device(np.flatnonzero(~is_filtered))
            token[index[plain]] = first_above(probability[plain], number[plain])
        if not is_filtered.any():
            return
        if not is_filtered.all():
            filtered = self._on_device(np.flatnonzero(is_filtered))
            logits, probability = logits[filtered], probability[filtered]
            number, index = number[filtered], index[filtered]
        weights = survivors(logits, probability, self._filters_of(slots[is_filtered]))
        token[index] = first_above(weights, number)

    def _filters_of(self, slots: Int32Array) -> Filters:
        return Filters(
            top_k=self._on_device(self._top_k[slots]),
            top_p=self._on_device(self._top_p[slots]),
            min_p=self._on_device(self._min_p[slots]),
        )

    def _on_device(self, column: npt.NDArray[np.int64] | npt.NDArray[np.float64]) -> Tensor:
        return torch.from_numpy(column).to(self._device)

    def _score(
        self,
        logits: Tensor,
        token: Tensor,
        slots: Int32Array,
        positions: Int32Array,
        rows: Int32Array,
    ) -> LogprobRows | None:
        num_top = self._num_logprobs[slots]
        asking = np.flatnonzero(num_top != NO_LOGPROBS)
        if not len(asking):
            return None
        index = self._on_device(asking)
        return logprobs.score(
            logits.index_select(0, index),
            token[index].cpu().numpy(),
            num_top[asking],
            int32(rows[asking]),
            int32(positions[asking]),
        )


def first_above(weights: Tensor, number: Tensor) -> Tensor:
    """The first column of each row at which the running sum exceeds `number` times the sum.

    Never a column of weight 0: there the sum is what it was one column before. Sums are
    float64 and sequential on a CPU.

    Shapes:
        weights: [R, W], at least 0 and not all 0
        number: [R] float64 in [0, 1)
    Returns:
        [R] int64
    """
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    total = sums[:, -1:].contiguous()
    column = torch.searchsorted(sums, number[:, None] * total, right=True)
    # The product may round up to the sum itself, which no running sum exceeds.
    last = torch.searchsorted(sums, total)
    return torch.minimum(column, last)[:, 0]
