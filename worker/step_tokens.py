"""The end of a step, after the model's last layer: from hidden states to tokens and their
log-probabilities.

Every rank of the last stage takes part, since each has a share of the vocabulary; the first of
them has the sampler, and learns what the others need not know.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scheduler.arrays import Int32Array
from scheduler.plan import StepPlan
from worker import logprobs
from worker.batch import Slices
from worker.estimate import SAMPLED_AT_ONCE
from worker.host_copy import HostCopy
from worker.launched_step import StepParts
from worker.models.decoder import Decoder
from worker.parallel import Communicator
from worker.prompt_scores import PromptScores
from worker.sampler import Sampler

SCORED_AT_ONCE = 64
"""Prompt tokens whose logits exist at the same time. More only costs memory."""


class StepTokens:
    """Chooses and scores the tokens of the running sequences, by slot."""

    def __init__(
        self,
        communicator: Communicator,
        vocab_widths: list[int],
        sampler: Sampler | None,
        *,
        max_num_seqs: int,
        device: torch.device,
    ) -> None:
        """
        Args:
            communicator: of the ranks of the stage.
            vocab_widths: each rank's share of the vocabulary.
            sampler: None on all ranks but one.
        """
        self._communicator, self._vocab_widths = communicator, vocab_widths
        self._sampler = sampler
        self._device = device
        self._max_num_seqs = max_num_seqs
        self._scores = PromptScores(max_num_seqs)

    @property
    def answers(self) -> bool:
        """Whether this rank samples, and so answers plans."""
        return self._sampler is not None

    def can_begin(self, plan: StepPlan) -> bool:
        """Whether no sequence of the plan needs its last token for more than computing."""
        if self._sampler is None:
            return True
        count = plan.count if len(plan.count) else 1
        return not self._sampler.needs_history(plan.slot, plan.start + count)

    def follow(self, plan: StepPlan) -> None:
        """Forget the sequences that end, and take over those that begin."""
        self._scores.release(plan.released)
        if self._sampler is not None:
            for slot in plan.released.tolist():
                self._sampler.release(slot)
        for admission in plan.admitted:
            self._scores.admit(admission)
            if self._sampler is not None:
                self._sampler.admit(admission)

    def prepare(self, slices: Slices, history: Int32Array) -> None:
        """Begin what can be done before the model has computed.

        Shapes:
            history: [slots, positions], every known token
        """
        if self._sampler is not None:
            rows = np.flatnonzero(slices.samples)
            self._sampler.prepare(slices.slot[rows], slices.stop[rows], history)

    def scored_rows(self, slices: Slices) -> npt.NDArray[np.int64]:
        """Tokens of the step whose hidden states `score_prompts` needs."""
        return self._scores.wanted(slices)

    def sample(
        self,
        decoder: Decoder,
        slices: Slices,
        hidden: Tensor,
        history: Int32Array,
        parts: StepParts,
    ) -> Tensor:
        """[R] int64: chosen on the stage's first rank, to be filled on the others. Adds to
        `parts`.

        Shapes:
            hidden: [R, hidden], of the last token of each slice that samples
        """
        rows = np.flatnonzero(slices.samples).astype(np.int32)
        size = self.sampled_at_once(len(rows))
        chosen = []
        for at in range(0, len(rows), size):
            logits = self.logits(decoder, hidden[at : at + size])
            chosen.append(self._sample_rows(slices, rows[at : at + size], logits, history, parts))
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen)

    def sampled_at_once(self, num_rows: int) -> int:
        """Rows whose logits exist at the same time."""
        return min(num_rows, SAMPLED_AT_ONCE) if self._device.type == "cpu" else num_rows

    def _sample_rows(
        self,
        slices: Slices,
        rows: Int32Array,
        logits: Tensor | None,
        history: Int32Array,
        parts: StepParts,
    ) -> Tensor:
        if logits is None or self._sampler is None:
            return torch.empty(len(rows), dtype=torch.int64, device=self._device)
        chosen = self._sampler.sample(logits, slices.slot[rows], slices.stop[rows], history, rows)
        if chosen.logprobs is not None:
            parts.logprobs.append(chosen.logprobs)
        parts.failed.update({int(rows[row]): why for row, why in chosen.failed.items()})
        if chosen.unchecked is not None:
            parts.unchecked = (HostCopy(chosen.unchecked), slices.slot[rows])
        return chosen.token

    def score_prompts(
        self,
        decoder: Decoder,
        slices: Slices,
        hidden: Tensor,
        history: Int32Array,
        parts: StepParts,
    ) -> None:
        """Add to `parts` the log-probabilities of prompt tokens that were asked for.

        Shapes:
            hidden: [number of `scored_rows`, hidden], in that order
        """
        if not len(hidden) and not self._scores.num_kept:
            return
        scored = self._scores.collect(slices, hidden)
        if scored is None:
            return
        tokens = history[slices.slot[scored.slice_row], scored.position]
        for start in range(0, len(tokens), SCORED_AT_ONCE):
            part = slice(start, start + SCORED_AT_ONCE)
            logits = self.logits(decoder, scored.hidden[part])
            if logits is not None:
                parts.logprobs.append(
                    logprobs.score(
                        logits,
                        tokens[part],
                        scored.num_top[part],
                        scored.slice_row[part],
                        scored.position[part],
                    )
                )

    def logits(self, decoder: Decoder, hidden: Tensor) -> Tensor | None:
        """[R, vocab_size] float32 on the stage's first rank, None on its others."""
        return self._communicator.gather_columns(decoder.logits(hidden), self._vocab_widths)

    def reset(self) -> None:
        """Forget all sequences."""
        self._scores = PromptScores(self._max_num_seqs)
        if self._sampler is not None:
            self._sampler.reset()

    def close(self) -> None:
        """End the threads of the sampler."""
        if self._sampler is not None:
            self._sampler.close()
