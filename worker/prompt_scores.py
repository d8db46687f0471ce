"""Which hidden states score prompt tokens, so that each is scored once however it is cut.

The log-probability of the prompt token at position p comes from the logits at p - 1. Where
p - 1 is the last position of a slice, the token at p comes with the next slice only, so the
hidden state is kept until then (not the logits: those are of the vocabulary's size).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scheduler.arrays import Int32Array, int32
from scheduler.plan import Admission
from worker.batch import Slices

NOT_ASKED = -1


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """K prompt tokens to score in one step."""

    slice_row: Int32Array
    """[K] which slice of the step"""
    position: Int32Array
    """[K] of the token that is scored"""
    num_top: Int32Array
    """[K] alternatives asked for"""
    hidden: Tensor
    """[K, hidden]"""


class PromptScores:
    """The running sequences that asked for prompt log-probabilities, by slot."""

    def __init__(self, max_num_seqs: int) -> None:
        self._num_top: Int32Array = np.full(max_num_seqs, NOT_ASKED, dtype=np.int32)
        self._num_prompt: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)
        self._kept: dict[int, Tensor] = {}
        """By slot the hidden state [hidden] that scores the next slice's first token."""

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def admit(self, admission: Admission) -> None:
        asked = admission.sampling.prompt_logprobs
        self._num_top[admission.slot] = NOT_ASKED if asked is None else asked
        self._num_prompt[admission.slot] = admission.num_prompt

    def release(self, slots: Int32Array) -> None:
        self._num_top[slots] = NOT_ASKED
        if self._kept:
            for slot in slots.tolist():
                self._kept.pop(slot, None)

    def wanted(self, slices: Slices) -> npt.NDArray[np.int64]:
        """Tokens of the step (rows of its flat tensors) whose hidden states `collect` needs."""
        rows = [
            np.arange(slices.offsets[row], slices.offsets[row] + needed, dtype=np.int64)
            for row, needed in self._needed(slices)
        ]
        return np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)

    def collect(self, slices: Slices, hidden: Tensor) -> ScoredRows | None:
        """What can be scored now; the rest is kept.

        Shapes:
            hidden: [number of `wanted`, hidden], in that order
        """
        slice_row: list[int] = []
        position: list[int] = []
        states: list[Tensor] = []
        taken = 0
        for row, needed in self._needed(slices):
            own = hidden[taken : taken + needed]
            taken += needed
            slot, start = int(slices.slot[row]), int(slices.start[row])
            first = start + 1
            kept = self._kept.pop(slot, None)
            if kept is not None:
                states.append(kept[None])
                first = start
            if start + needed < self._num_prompt[slot] and needed == slices.count[row]:
                self._kept[slot] = own[-1].clone()
                own = own[:-1]
            states.append(own)
            scored = len(own) + (kept is not None)
            slice_row += [row] * scored
            position += range(first, first + scored)
        if not slice_row:
            return None
        rows = int32(slice_row)
        num_top = self._num_top[slices.slot[rows]]
        return ScoredRows(rows, int32(position), num_top, torch.cat(states))

    def _needed(self, slices: Slices) -> list[tuple[int, int]]:
        """(slice, how many of its first tokens) that have a prompt token after them, for the
        slices of sequences that asked and are still in their prompt."""
        asking = (self._num_top[slices.slot] != NOT_ASKED) & (
            slices.start < self._num_prompt[slices.slot]
        )
        if not asking.any():
            return []
        last = np.minimum(slices.stop, self._num_prompt[slices.slot] - 1)
        return [
            (row, int(last[row] - slices.start[row])) for row in np.flatnonzero(asking).tolist()
        ]
