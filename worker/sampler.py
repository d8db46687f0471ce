"""From logits to tokens, each row on its own: by its parameters, its past and its number.

The order is: log-probabilities of the raw logits are taken, `worker.edits` (penalties, bias,
bans), `worker.guide` (grammars), temperature, `worker.filters` (min_p, top_k, top_p), and then
the first id whose cumulative probability exceeds the row's random number. That number is a
function of (seed, position), so batch-mates, chunking, preemption and recovery change nothing.
On a CPU every step of it computes each row in the same order of operations whatever else is in
the batch, so the same logits give the same token, bit for bit.
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
from worker.guide import Guide
from worker.host_copy import to_device
from worker.ops.draws import Draw
from worker.ranking import LARGEST, BadLogits, leaders

NO_LOGPROBS = -1


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The tokens of one step, in the order of the logits' rows."""

    token: Tensor
    """[R] int64, on the device of the logits"""
    logprobs: LogprobRows | None
    """Of the tokens whose sequences asked, by row"""
    failed: dict[int, str]
    """Why sequences cannot go on, by row of the logits; their tokens mean nothing"""
    unchecked: Tensor | None = None
    """[R] each row's largest logit, for `check_logits`, if they are still on another device"""


@dataclass(frozen=True, slots=True)
class _AskedRows:
    """What the sequences of some slots ask for. [R] each, the tensors on the sampler's device."""

    slots: Int32Array
    edited_until: npt.NDArray[np.int64]
    has_logprobs: bool
    temperature: Tensor
    filters: Filters
    seed: Tensor


class Sampler:
    """The sampling parameters of all slots, as columns, and what is kept of their past.

    The columns are on the host: a step gathers the rows it needs and sends those alone. With
    `draw`, a kernel of the set of operations goes from edited logits to tokens; else torch does.
    Without `guide`, no sequence may have a grammar.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: str | torch.device,
        draw: Draw | None = None,
        guide: Guide | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._draw = draw
        self._guide = guide
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
        self._asked: _AskedRows | None = None
        """What the last step's sequences ask for; most steps have the same ones as the last."""

    def admit(self, admission: Admission) -> None:
        """Take over the parameters of the sequence that now has the slot."""
        slot, asked = admission.slot, admission.sampling
        assert not self._is_held[slot], f"slot {slot} is admitted twice"
        assert asked.seed is not None or asked.is_greedy, f"slot {slot} draws without a seed"
        self._is_held[slot] = True
        self._asked = None
        self._seed[slot] = 0 if asked.seed is None else asked.seed
        self._is_greedy[slot] = asked.is_greedy
        self._num_logprobs[slot] = NO_LOGPROBS if asked.logprobs is None else asked.logprobs
        edits = SequenceEdits(admission)
        self._edited_until[slot] = edits.active_until
        if edits.active_until:
            self._edits[slot] = edits
        top_k = min(asked.top_k or self._vocab_size, self._vocab_size)
        self._is_filtered[slot] = top_k < self._vocab_size or asked.top_p < 1.0 or asked.min_p > 0.0
        self._temperature[slot] = 0.0 if asked.is_greedy else asked.temperature
        self._top_k[slot] = top_k
        self._top_p[slot] = asked.top_p
        self._min_p[slot] = asked.min_p
        if edits.is_guided:
            assert self._guide is not None, f"slot {slot} has a grammar, but there is no guide"
            self._guide.admit(admission)

    def release(self, slot: int) -> None:
        """Forget the sequence that had the slot."""
        assert self._is_held[slot], f"slot {slot} is released but not held"
        self._is_held[slot] = False
        self._edits.pop(slot, None)
        if self._guide is not None:
            self._guide.release(slot)

    def reset(self) -> None:
        """Forget all sequences."""
        for slot in np.flatnonzero(self._is_held).tolist():
            self.release(slot)
        self._asked = None

    def needs_history(self, slots: Int32Array, positions: Int32Array) -> bool:
        """Whether a token at one of these positions depends on more of the past than the logits."""
        return bool((positions < self._edited_until[slots]).any())

    @property
    def num_edited(self) -> int:
        """Admitted sequences of which something is kept beyond the columns."""
        return len(self._edits)

    def prepare(self, slots: Int32Array, positions: Int32Array, history: Int32Array) -> None:
        """Begin what can be done before the logits are there; as for `sample`, which follows."""
        if self._guide is not None:
            self._guide.prepare(slots, positions, history)

    def close(self) -> None:
        """End the threads of the guide."""
        if self._guide is not None:
            self._guide.close()

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
        asked = self._asked_by(slots)
        is_edited = positions < asked.edited_until
        unchecked = None
        if not is_edited.any():
            best, token = self._choose(logits, slots, positions)
            if self._device.type == "cpu":
                check_logits(best, slots)
            else:
                unchecked = best
        else:
            check_logits(logits.amax(dim=-1), slots)
            token = torch.empty(len(slots), dtype=torch.int64, device=logits.device)
            plain, edited = np.flatnonzero(~is_edited), np.flatnonzero(is_edited)
            if len(plain):
                index = self._on_device(plain)
                own = logits.index_select(0, index)
                token[index] = self._choose(own, slots[plain], positions[plain])[1]
            index = self._on_device(edited)
            token[index] = self._choose_edited(
                logits.index_select(0, index), slots[edited], positions[edited], history
            )
        failed = {} if self._guide is None else self._guide.failures(slots.tolist())
        if not asked.has_logprobs:
            return SampledRows(token, None, failed, unchecked)
        rows = np.arange(len(slots), dtype=np.int32) if rows is None else rows
        return SampledRows(
            token, self._score(logits, token, slots, positions, rows, failed), failed, unchecked
        )

    def _asked_by(self, slots: Int32Array) -> "_AskedRows":
        """Gathered from the columns, and kept until a sequence comes or other slots are asked."""
        asked = self._asked
        if asked is None or not np.array_equal(asked.slots, slots):
            assert bool(self._is_held[slots].all()), f"some of slots {slots} are not admitted"
            asked = self._asked = _AskedRows(
                slots=slots,
                edited_until=self._edited_until[slots],
                has_logprobs=bool((self._num_logprobs[slots] != NO_LOGPROBS).any()),
                temperature=self._on_device(self._temperature[slots]).float(),
                filters=self._filters_of(slots),
                seed=self._on_device(self._seed[slots]),
            )
        return asked

    def _choose_edited(
        self, logits: Tensor, slots: Int32Array, positions: Int32Array, history: Int32Array
    ) -> Tensor:
        """[R] the tokens of rows whose logits are changed before the choice."""
        sequences = [self._edits[slot] for slot in slots.tolist()]
        edited = logits.clone()
        edit(edited, sequences, positions.tolist(), [history[slot] for slot in slots])
        if self._guide is not None:
            self._guide.mask(edited, slots.tolist())
        best, token = self._choose(edited, slots, positions)
        check_logits(best, slots)
        for row in torch.isneginf(best).nonzero()[:, 0].tolist():
            if sequences[row].is_guided:
                assert self._guide is not None
                token[row] = self._guide.end_of(int(slots[row]), logits[row])
            else:
                token[row] = fallback(logits[row], sequences[row].allowed)
        return token

    def _choose(
        self, logits: Tensor, slots: Int32Array, positions: Int32Array
    ) -> tuple[Tensor, Tensor]:
        """[R] the largest logits, and [R] the tokens; of a row without a finite logit, id 0."""
        if self._draw is not None:
            return self._choose_by_kernel(self._draw, logits, slots, positions)
        best, token = leaders(logits)
        is_drawn = ~self._is_greedy[slots] & np.isfinite(best.cpu().numpy())
        if is_drawn.all():
            token = self._drawn(logits, slots, positions)
        elif is_drawn.any():
            rows = np.flatnonzero(is_drawn)
            index = self._on_device(rows)
            token[index] = self._drawn(logits.index_select(0, index), slots[rows], positions[rows])
        return best, token

    def _choose_by_kernel(
        self, draw: Draw, logits: Tensor, slots: Int32Array, positions: Int32Array
    ) -> tuple[Tensor, Tensor]:
        asked = self._asked_by(slots)
        filters = asked.filters
        drawn = draw(
            logits,
            asked.temperature,
            filters.top_k,
            filters.top_p,
            filters.min_p,
            asked.seed,
            self._on_device(positions.astype(np.int64)),
        )
        return drawn.best, drawn.token

    def _drawn(self, logits: Tensor, slots: Int32Array, positions: Int32Array) -> Tensor:
        """[R] tokens chosen by chance; every row has a finite largest logit."""
        number = self._on_device(uniform(self._seed[slots], positions))
        temperature = self._on_device(self._temperature[slots]).to(logits.dtype)
        weights = torch.softmax(logits / temperature[:, None], dim=-1)
        is_filtered = self._is_filtered[slots]
        if is_filtered.all():
            weights = survivors(logits, weights, self._filters_of(slots))
        elif is_filtered.any():
            rows = np.flatnonzero(is_filtered)
            index = self._on_device(rows)
            weights[index] = survivors(
                logits.index_select(0, index),
                weights.index_select(0, index),
                self._filters_of(slots[rows]),
            )
        return first_above(weights, number)

    def _filters_of(self, slots: Int32Array) -> Filters:
        return Filters(
            top_k=self._on_device(self._top_k[slots]),
            top_p=self._on_device(self._top_p[slots]),
            min_p=self._on_device(self._min_p[slots]),
        )

    def _on_device(self, column: npt.NDArray[np.int64] | npt.NDArray[np.float64]) -> Tensor:
        return to_device(torch.from_numpy(column), self._device)

    def _score(
        self,
        logits: Tensor,
        token: Tensor,
        slots: Int32Array,
        positions: Int32Array,
        rows: Int32Array,
        failed: dict[int, str],
    ) -> LogprobRows | None:
        num_top = self._num_logprobs[slots]
        num_top[list(failed)] = NO_LOGPROBS
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


def check_logits(best: Tensor, slots: Int32Array) -> None:
    """Refuse rows whose largest logit says that they cannot be sampled from.

    Raises:
        BadLogits: names them.
    """
    values = best.cpu().numpy()
    is_good = np.abs(values) < LARGEST
    if is_good.all():
        return
    is_bad = ~is_good & ~np.isneginf(values)
    if is_bad.any():
        raise BadLogits(tuple(slots[is_bad].tolist()), tuple(values[is_bad].tolist()))


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
