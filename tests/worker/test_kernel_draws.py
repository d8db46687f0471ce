"""The sampler with a kernel for drawing, Triton's or the native one, against the one in torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch

from scheduler.arrays import NO_INT32, int32
from scheduler.plan import Admission
from scheduler.sampling import SamplingParams
from tests.worker import test_guide
from tests.worker.ops.interpreted import DEVICE
from worker.guide import Guide
from worker.ops.cpu import CpuOperations
from worker.ops.draws import Draw
from worker.ops.native.sampling import draw as draw_natively
from worker.ops.triton.sampling import draw as draw_in_triton
from worker.ranking import BadLogits
from worker.sampler import Sampler

VOCAB_SIZE = 50
ASKED = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1e-4, top_p=0.5),
    SamplingParams(temperature=0.01),
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(temperature=1.4, top_k=10, min_p=0.02),
    SamplingParams(allowed_token_ids=[4, 7, 9], top_k=20),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, top_k=5),
    SamplingParams(logit_bias={3: 4.0}, bad_word_ids=[[5], [1, 6]]),
    SamplingParams(min_tokens=20, max_tokens=30, stop_token_ids=[8, 9], temperature=2.0),
    SamplingParams(allowed_token_ids=[7, 9], bad_word_ids=[[7], [9]], top_k=3),
    SamplingParams(temperature=0, allowed_token_ids=[30, 20, 10]),
]
LENGTH = 12


@dataclass(frozen=True, slots=True)
class Kernel:
    draw: Draw | None
    device: str | torch.device


IN_TORCH = Kernel(None, "cpu")


@pytest.fixture(params=["triton", "native"])
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    if request.param == "triton":
        yield Kernel(draw_in_triton, DEVICE)
        return
    team = CpuOperations(num_threads=2).team
    yield Kernel(partial(draw_natively, team), "cpu")
    team.close()


def sampler_of(seed: int, kernel: Kernel) -> Sampler:
    sampler = Sampler(len(ASKED), VOCAB_SIZE, kernel.device, kernel.draw)
    for slot, params in enumerate(ASKED):
        asked = SamplingParams(
            **{name: getattr(params, name) for name in params.__struct_fields__ if name != "seed"},
            seed=1000 * seed + slot,
        )
        sampler.admit(Admission(slot=slot, sampling=asked, num_prompt=3, blocks=NO_INT32))
    return sampler


@pytest.mark.parametrize("seed", range(4))
def test_the_kernel_chooses_what_torch_chooses(kernel: Kernel, seed: int) -> None:
    generator = np.random.default_rng(seed)
    history = generator.integers(0, VOCAB_SIZE, (len(ASKED), LENGTH)).astype(np.int32)
    logits = torch.from_numpy(2 * generator.standard_normal((len(ASKED), VOCAB_SIZE))).float()
    slots = int32(generator.permutation(len(ASKED)))
    positions = np.full(len(ASKED), LENGTH, dtype=np.int32)

    tokens = [
        sampler_of(seed, each)
        .sample(logits.to(each.device), slots, positions, history)
        .token.tolist()
        for each in (IN_TORCH, kernel)
    ]

    assert tokens[0] == tokens[1]


def test_unusable_logits_are_refused_by_the_kernel_too(kernel: Kernel) -> None:
    logits = torch.zeros(2, VOCAB_SIZE, device=kernel.device)
    logits[1, 5] = torch.nan

    with pytest.raises(BadLogits, match="slot 3: nan"):
        sampler_of(0, kernel).sample(
            logits, int32([0, 3]), int32([4, 4]), np.zeros((len(ASKED), 8), dtype=np.int32)
        )


def test_where_all_is_banned_the_fallback_is_the_same(kernel: Kernel) -> None:
    slot = next(row for row, asked in enumerate(ASKED) if asked.allowed_token_ids == (7, 9))
    logits = torch.arange(VOCAB_SIZE, dtype=torch.float32, device=kernel.device)[None]

    found = sampler_of(0, kernel).sample(
        logits, int32([slot]), int32([4]), np.zeros((len(ASKED), 8), dtype=np.int32)
    )

    assert found.token.tolist() == [9]


def test_a_grammar_bans_for_the_kernel_what_it_bans_in_torch(kernel: Kernel) -> None:
    asked = [
        SamplingParams(temperature=0.0, grammar=test_guide.DIGITS),
        SamplingParams(seed=5, grammar=test_guide.DIGITS),
        SamplingParams(seed=6, top_k=4, top_p=0.9),
        SamplingParams(seed=7, top_k=4, grammar='start: "ab"'),
    ]
    vocab_size, slots = test_guide.VOCAB_SIZE, int32([3, 0, 2, 1])
    logits = torch.randn(len(asked), vocab_size, generator=torch.Generator().manual_seed(0))
    log, positions = test_guide.log_of([test_guide.PROMPT] * len(asked)), int32([2] * len(asked))
    tokens = []
    for each in (IN_TORCH, kernel):
        guide = Guide(test_guide.tokenizer, vocab_size)
        sampler = Sampler(len(asked), vocab_size, each.device, each.draw, guide)
        for slot, one in enumerate(asked):
            sampler.admit(
                Admission(slot=slot, sampling=one, num_prompt=2, blocks=NO_INT32, end_ids=(0,))
            )
        sampler.prepare(slots, positions, log)
        tokens.append(sampler.sample(logits.to(each.device), slots, positions, log).token.tolist())
        sampler.close()

    assert tokens[0] == tokens[1]
    digits = {token for digit in "0123456789" for token in test_guide.ids(digit)}
    assert {tokens[0][1], tokens[0][3]} <= digits | set(test_guide.ids("12"))
