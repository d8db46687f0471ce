"""The sampler with the device's kernel for drawing, against the sampler in torch."""

import numpy as np
import pytest
import torch

from scheduler.arrays import NO_INT32, int32
from scheduler.plan import Admission
from scheduler.sampling import SamplingParams
from tests.worker.ops.interpreted import DEVICE
from worker.ops.triton.sampling import draw
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


def sampler_of(seed: int, on_device: bool) -> Sampler:
    sampler = (
        Sampler(len(ASKED), VOCAB_SIZE, DEVICE, draw=draw)
        if on_device
        else Sampler(len(ASKED), VOCAB_SIZE, "cpu")
    )
    for slot, params in enumerate(ASKED):
        asked = SamplingParams(
            **{name: getattr(params, name) for name in params.__struct_fields__ if name != "seed"},
            seed=1000 * seed + slot,
        )
        sampler.admit(Admission(slot=slot, sampling=asked, num_prompt=3, blocks=NO_INT32))
    return sampler


@pytest.mark.parametrize("seed", range(4))
def test_the_devices_kernel_chooses_what_torch_chooses(seed: int) -> None:
    generator = np.random.default_rng(seed)
    history = generator.integers(0, VOCAB_SIZE, (len(ASKED), LENGTH)).astype(np.int32)
    logits = torch.from_numpy(2 * generator.standard_normal((len(ASKED), VOCAB_SIZE))).float()
    slots = int32(generator.permutation(len(ASKED)))
    positions = np.full(len(ASKED), LENGTH, dtype=np.int32)

    tokens = [
        sampler_of(seed, on_device).sample(rows, slots, positions, history).token.tolist()
        for on_device, rows in ((False, logits), (True, logits.to(DEVICE)))
    ]

    assert tokens[0] == tokens[1]


def test_unusable_logits_are_refused_on_the_device_too() -> None:
    logits = torch.zeros(2, VOCAB_SIZE, device=DEVICE)
    logits[1, 5] = torch.nan

    with pytest.raises(BadLogits, match="slot 3: nan"):
        sampler_of(0, on_device=True).sample(
            logits, int32([0, 3]), int32([4, 4]), np.zeros((len(ASKED), 8), dtype=np.int32)
        )


def test_where_all_is_banned_the_fallback_is_the_same_on_the_device() -> None:
    slot = next(row for row, asked in enumerate(ASKED) if asked.allowed_token_ids == (7, 9))
    logits = torch.arange(VOCAB_SIZE, dtype=torch.float32, device=DEVICE)[None]

    found = sampler_of(0, on_device=True).sample(
        logits, int32([slot]), int32([4]), np.zeros((len(ASKED), 8), dtype=np.int32)
    )

    assert found.token.tolist() == [9]
