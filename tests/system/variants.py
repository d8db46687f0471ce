"""One load under many circumstances: how a cluster is made, and what goes on beside the load."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.request import Finish
from scheduler.sampling import SamplingParams
from tests.system.in_process import Answer, InProcessCluster, LoadedRanks

NUM_OUTPUT = 8
AMPLE_TOKENS = 4096
"""Pool for the probes and all their company at once."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, seed=0, logprobs=2, ignore_eos=True)


def sampled(seed: int, max_tokens: int = NUM_OUTPUT) -> SamplingParams:
    return SamplingParams(
        temperature=0.8, top_p=0.95, seed=seed, max_tokens=max_tokens, logprobs=0, ignore_eos=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What may differ without a token's differing."""

    tp: int = 1
    pp: int = 1
    budget: int = 64
    block_size: int = 16
    cache: str = "on"
    """on, off, warm (the first half of each prompt is cached), or full (all of each)"""
    pool_tokens: int = AMPLE_TOKENS
    plans: int = 2
    company: int = 0
    """Other requests that join and leave meanwhile."""
    aborts: bool = False
    """Whether half of the company is aborted on its way."""

    def __str__(self) -> str:
        plain = Variant()
        parts = [
            f"{name}={getattr(self, name)}"
            for name in self.__slots__
            if getattr(self, name) != getattr(plain, name)
        ]
        return " ".join(parts) or "plain"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run gave: greedy and sampled answers to the same prompts."""

    greedy: list[Answer]
    drawn: list[Answer]
    cluster: InProcessCluster

    @property
    def answers(self) -> list[Answer]:
        return self.greedy + self.drawn


def run(ranks: LoadedRanks, prompts: Sequence[list[int]], variant: Variant) -> Outcome:
    """Answer each prompt greedily and by chance, under the variant's circumstances."""
    cluster = InProcessCluster(
        ranks,
        num_blocks=variant.pool_tokens // variant.block_size,
        block_size=variant.block_size,
        max_num_seqs=min(48, variant.budget),
        max_num_batched_tokens=variant.budget,
        plans_in_flight=variant.plans,
        enable_prefix_caching=variant.cache != "off",
        watermark=0.0,
    )
    _warm(cluster, prompts, variant.cache)
    greedy = [cluster.submit(prompt, GREEDY) for prompt in prompts]
    drawn = [cluster.submit(prompt, sampled(seed)) for seed, prompt in enumerate(prompts)]
    company = _Company(cluster, prompts, variant)
    cluster.run(company)
    assert company.num_left == 0, "the probes were done before all of their company had come"
    return Outcome(greedy, drawn, cluster)


def _warm(cluster: InProcessCluster, prompts: Sequence[list[int]], cache: str) -> None:
    one = SamplingParams(temperature=0.0, max_tokens=1, seed=0)
    if cache == "warm":
        for prompt in prompts:
            # Another end, so that only what is truly shared may be reused.
            cluster.submit([*prompt[: (len(prompt) + 1) // 2], 17], one)
    elif cache == "full":
        for prompt in prompts:
            cluster.submit(prompt, one)
    else:
        return
    cluster.run()


class _Company:
    """Strangers of every kind who come one after the other, some of whom go early."""

    def __init__(
        self, cluster: InProcessCluster, prompts: Sequence[list[int]], variant: Variant
    ) -> None:
        self._cluster, self.num_left, self._aborts = cluster, variant.company, variant.aborts
        self._prompts = prompts
        self._rng = np.random.default_rng(variant.company)
        self._here: list[Answer] = []

    def __call__(self) -> None:
        while self.num_left and self._rng.random() < 0.8:
            self.num_left -= 1
            self._here.append(self._cluster.submit(self._prompt(), self._sampling()))
        if self._aborts and self._rng.random() < 0.4:
            live = [one for one in self._here if one.finish is Finish.NOT_YET]
            if live:
                self._cluster.abort(live[int(self._rng.integers(len(live)))])

    def _prompt(self) -> list[int]:
        if self._rng.random() < 0.3:
            shared = self._prompts[int(self._rng.integers(len(self._prompts)))]
            return shared[: int(self._rng.integers(1, len(shared) + 1))]
        length = int(self._rng.integers(1, 40))
        return self._rng.integers(100, 40_000, length).tolist()

    def _sampling(self) -> SamplingParams:
        kind = int(self._rng.integers(4))
        most = int(self._rng.integers(1, 9))
        if kind == 0:
            return SamplingParams(temperature=0.0, max_tokens=most, seed=0)
        if kind == 1:
            return SamplingParams(
                temperature=0.0, max_tokens=most, seed=0, repetition_penalty=1.3, logprobs=5
            )
        if kind == 2:
            return SamplingParams(
                seed=most, max_tokens=most, top_k=20, min_p=0.02, frequency_penalty=0.5
            )
        return SamplingParams(temperature=1.5, seed=most, max_tokens=most, prompt_logprobs=1)
