"""Changes to logits that only some sequences ask for, and for which ids they ask.

In this order, as vLLM's meanings and transformers' repetition penalty have it:

    repetition_penalty  over prompt and output: a positive logit is divided, another multiplied
    frequency_penalty   times the count in the output, taken off
    presence_penalty    taken off if the output holds the token
    logit_bias          added
    allowed_token_ids   every other id is banned
    bad_word_ids        the last id is banned where the output ends in the ones before it
    min_tokens          end ids and stop ids are banned in the first output tokens
    grammar             every id is banned that cannot follow (`worker.guide`)

All of it touches a few ids per row, so rows are edited together: one list of places in the
flat logits per kind of change. Rows that ask for nothing never come here.

Source: repetition penalty, Keskar et al. 2019 (arXiv:1909.05858), section 4.1.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scheduler.arrays import Int32Array
from scheduler.plan import Admission
from worker.token_counts import TokenCounts

IdArray = npt.NDArray[np.int64]
NO_IDS: IdArray = np.empty(0, dtype=np.int64)
FOR_EVER = 2**62


class SequenceEdits:
    """What one sequence asks for beyond temperature and filters."""

    def __init__(self, admission: Admission) -> None:
        asked = admission.sampling
        self.num_prompt = admission.num_prompt
        self.repetition_penalty = asked.repetition_penalty
        self.presence_penalty = asked.presence_penalty
        self.frequency_penalty = asked.frequency_penalty
        self.counts = TokenCounts(admission.num_prompt) if _is_penalized(admission) else None
        bias = asked.logit_bias or {}
        self.bias_ids = _ids(bias.keys())
        self.bias = np.fromiter(bias.values(), dtype=np.float64)
        allowed = asked.allowed_token_ids
        self.allowed = None if allowed is None else np.unique(_ids(allowed))
        self.bad_words = [_ids(word) for word in asked.bad_word_ids]
        self.guarded_until = admission.num_prompt + asked.min_tokens
        self.is_guided = asked.grammar is not None
        self.guarded = NO_IDS
        if asked.min_tokens:
            self.guarded = np.unique(_ids((*admission.end_ids, *asked.stop_token_ids)))

    @property
    def active_until(self) -> int:
        """From this position on the sequence asks for nothing."""
        is_lasting = self.counts or len(self.bias) or self.allowed is not None or self.bad_words
        if is_lasting or self.is_guided:
            return FOR_EVER
        return self.guarded_until if len(self.guarded) else 0

    def banned(self, position: int, tokens: Int32Array) -> list[IdArray]:
        """The ids that may not stand at `position`, after `tokens[:position]`."""
        bans = []
        if position < self.guarded_until and len(self.guarded):
            bans.append(self.guarded)
        for word in self.bad_words:
            start = position - (len(word) - 1)
            if start >= self.num_prompt and (tokens[start:position] == word[:-1]).all():
                bans.append(word[-1:])
        return bans


def edit(
    logits: Tensor,
    sequences: Sequence[SequenceEdits],
    positions: Sequence[int],
    tokens: Sequence[Int32Array],
) -> None:
    """Change each row of `logits` in place as its sequence asks.

    Args:
        logits: [R, V] float, contiguous
        positions: [R] of the tokens to be chosen
        tokens: [R] each sequence's tokens from its start, valid below its position
    """
    _penalize(logits, sequences, positions, tokens)
    _add_bias(logits, sequences)
    _keep_allowed(logits, sequences)
    _ban(logits, sequences, positions, tokens)


def fallback(logits: Tensor, allowed: IdArray | None) -> int:
    """The token of a row in which every id is banned: the best one by the model's own logits.

    min_tokens and bad words give way; allowed_token_ids does not. The lowest id on ties,
    also where the model itself rules out everything.

    Args:
        logits: [V] as the model gave them
    """
    if allowed is None:
        return int(logits.argmax())
    return int(allowed[int(logits[torch.from_numpy(allowed).to(logits.device)].argmax())])


@dataclass(frozen=True, slots=True)
class _Penalties:
    """Columns over all tokens that some penalized row has seen."""

    places: IdArray
    repetition: npt.NDArray[np.float64]
    frequency: npt.NDArray[np.float64]
    presence: npt.NDArray[np.float64]


def _penalize(
    logits: Tensor,
    sequences: Sequence[SequenceEdits],
    positions: Sequence[int],
    tokens: Sequence[Int32Array],
) -> None:
    vocab_size = logits.shape[1]
    parts = []
    for row, sequence in enumerate(sequences):
        if sequence.counts is None:
            continue
        sequence.counts.count_up_to(positions[row], tokens[row])
        ids, counts = sequence.counts.ids, sequence.counts.in_output.astype(np.float64)
        parts.append(
            _Penalties(
                row * vocab_size + ids,
                np.full(len(ids), sequence.repetition_penalty),
                np.multiply(sequence.frequency_penalty, counts),
                np.where(counts > 0, sequence.presence_penalty, 0.0),
            )
        )
    if not parts:
        return
    places = _on(logits, np.concatenate([part.places for part in parts]))
    repetition = _like(logits, np.concatenate([part.repetition for part in parts]))
    frequency = _like(logits, np.concatenate([part.frequency for part in parts]))
    presence = _like(logits, np.concatenate([part.presence for part in parts]))
    flat = logits.view(-1)
    seen = flat[places]
    seen = torch.where(seen < 0, seen * repetition, seen / repetition)
    flat[places] = seen - frequency - presence


def _add_bias(logits: Tensor, sequences: Sequence[SequenceEdits]) -> None:
    biased = [(row, each) for row, each in enumerate(sequences) if len(each.bias)]
    if not biased:
        return
    vocab_size = logits.shape[1]
    places = np.concatenate([row * vocab_size + each.bias_ids for row, each in biased])
    bias = np.concatenate([each.bias for _, each in biased])
    logits.view(-1)[_on(logits, places)] += _like(logits, bias)


def _keep_allowed(logits: Tensor, sequences: Sequence[SequenceEdits]) -> None:
    vocab_size = logits.shape[1]
    rows, parts = [], []
    for row, sequence in enumerate(sequences):
        if sequence.allowed is not None:
            rows.append(row)
            parts.append(row * vocab_size + sequence.allowed)
    if not rows:
        return
    places = _on(logits, np.concatenate(parts))
    kept = logits.view(-1)[places]
    logits[_on(logits, np.array(rows))] = -torch.inf
    logits.view(-1)[places] = kept


def _ban(
    logits: Tensor,
    sequences: Sequence[SequenceEdits],
    positions: Sequence[int],
    tokens: Sequence[Int32Array],
) -> None:
    vocab_size = logits.shape[1]
    parts = [
        row * vocab_size + ids
        for row, sequence in enumerate(sequences)
        for ids in sequence.banned(positions[row], tokens[row])
    ]
    if parts:
        logits.view(-1)[_on(logits, np.concatenate(parts))] = -torch.inf


def _is_penalized(admission: Admission) -> bool:
    asked = admission.sampling
    return (
        asked.repetition_penalty != 1.0
        or asked.presence_penalty != 0.0
        or asked.frequency_penalty != 0.0
    )


def _ids(values: Iterable[int]) -> IdArray:
    return np.array(list(values), dtype=np.int64)


def _on(logits: Tensor, ids: IdArray) -> Tensor:
    return torch.from_numpy(ids).to(logits.device)


def _like(logits: Tensor, values: npt.NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(values).to(logits.device, logits.dtype)
