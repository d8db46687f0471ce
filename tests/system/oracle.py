"""What the model really says: transformers in float32, forced along our own tokens.

One forward pass over prompt and output gives, for every position, what the reference would
have said there, so a choice that is excused hides nothing of what comes after it.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from scheduler.sampling import SamplingParams
from tests.system.in_process import Answer
from worker.chance import uniform

TIE = 1e-3
"""Two logits, or two places in a distribution, nearer than this may be told apart either way:
float32 sums in another order differ by some 1e-5 here."""
TOKENS_AT_ONCE = 256
_FEW = 32


@dataclass(frozen=True, slots=True)
class Said:
    """The reference's view of one sequence."""

    first: int
    """Position of the token that row 0 of `logits` predicts."""
    logits: Tensor
    """[N, V] float32"""

    def at(self, position: int) -> Tensor:
        """[V], the logits from which the token at `position` is chosen."""
        return self.logits[position - self.first]


class Oracle:
    """The reference model, which remembers what it was asked."""

    def __init__(self, model_dir: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self._threads = ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,))
        self._said: dict[tuple[int, ...], Said] = {}

    def close(self) -> None:
        self._threads.shutdown()

    def prepare(self, answers: Sequence[Answer]) -> None:
        """Ask for all that is not known yet, several sequences at a time."""
        wanted = {tuple(a.prompt + a.tokens): a for a in answers if a.tokens}
        todo = sorted((key for key in wanted if key not in self._said), key=len)
        batches: list[list[tuple[int, ...]]] = []
        for key in todo:
            if batches and (len(batches[-1]) + 1) * len(key) <= TOKENS_AT_ONCE:
                batches[-1].append(key)
            else:
                batches.append([key])
        firsts = {key: min([*wanted[key].logprobs, len(wanted[key].prompt)]) for key in todo}
        # The longest first, so that the last ones to end are short.
        list(self._threads.map(lambda batch: self._ask(batch, firsts), reversed(batches)))

    def said(self, answer: Answer) -> Said:
        self.prepare([answer])
        return self._said[tuple(answer.prompt + answer.tokens)]

    @torch.inference_mode()
    def _ask(self, batch: list[tuple[int, ...]], firsts: dict[tuple[int, ...], int]) -> None:
        # Padding on the right is never seen: attention is causal.
        longest = max(map(len, batch)) - 1
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        for row, key in enumerate(batch):
            ids[row, : len(key) - 1] = torch.tensor(key[:-1])
        hidden = self._model.model(ids, use_cache=False).last_hidden_state
        for row, key in enumerate(batch):
            rows = hidden[row, firsts[key] - 1 : len(key) - 1]
            self._said[key] = Said(firsts[key], self._model.lm_head(rows))

    def check(self, answer: Answer) -> None:
        """Every token is the reference's own, by the request's way of choosing, or excused."""
        said = self.said(answer)
        judge = _greedy_fault if answer.sampling.is_greedy else _sampled_fault
        for at, token in enumerate(answer.tokens):
            position = len(answer.prompt) + at
            fault = judge(said.at(position), token, position, answer.sampling)
            assert fault is None, (
                f"output token {at} of {len(answer.tokens)} after a prompt of "
                f"{len(answer.prompt)} tokens is {token}: {fault}"
            )

    def check_logprobs(self, answer: Answer) -> None:
        """Every log-probability that was sent is the reference's, within rounding."""
        said = self.said(answer)
        tokens = answer.prompt + answer.tokens
        for position, sent in answer.logprobs.items():
            assert tokens[position] in sent
            expected = said.at(position).log_softmax(dim=-1)
            for token, value in sent.items():
                wanted = float(expected[token])
                assert abs(value - wanted) < TIE, (
                    f"log-probability of {token} at {position}: {value}, wanted {wanted}"
                )


def _greedy_fault(
    logits: Tensor, token: int, position: int, sampling: SamplingParams
) -> str | None:
    """None if `token` is the most probable one, or the two best are a tie and it is one."""
    best, second = logits.topk(2).indices.tolist()
    if token == best:
        return None
    gap = float(logits[best] - logits[token])
    if token == second and gap < TIE:
        return None
    return f"the reference says {best}, {gap:.4f} above"


def _sampled_fault(
    logits: Tensor, token: int, position: int, sampling: SamplingParams
) -> str | None:
    """None if the number drawn for `position` chooses `token`, or lies at one of its borders.

    The nucleus itself is uncertain where its border lies within rounding of `top_p`, so each
    size that it may have counts.
    """
    assert sampling.seed is not None
    drawn = float(uniform(np.array([sampling.seed]), np.array([position]))[0])
    probability = (logits.double() / sampling.temperature).softmax(dim=-1)
    falling, order = probability.sort(descending=True, stable=True)
    before = falling.cumsum(dim=-1) - falling
    least, exact, most = (
        max(int((before < sampling.top_p + slack).sum()), 1) for slack in (-TIE, 0.0, TIE)
    )
    for size in {exact, least, most, *range(least, min(most, least + _FEW))}:
        kept = torch.zeros_like(probability)
        kept[order[:size]] = falling[:size]
        upper = (kept / kept.sum()).cumsum(dim=-1)
        lower = float(upper[token - 1]) if token else 0.0
        if float(kept[token]) > 0 and lower - TIE <= drawn < float(upper[token]) + TIE:
            return None
    meant = int(torch.searchsorted(upper, torch.tensor(drawn), right=True))
    return f"the number {drawn:.6f} chooses {meant} of the reference's distribution"
