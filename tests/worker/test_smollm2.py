"""The real model, through one worker group."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from scheduler.sampling import SamplingParams
from tests.worker.groups import WorkerGroup
from tests.worker.plans import Driven, PlanDriver

pytestmark = pytest.mark.model

END = 2
QUESTION = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
"""What the model's chat template makes of the question."""


def step(group: WorkerGroup, driver: PlanDriver, slices: list[tuple[Driven, int]]) -> None:
    plan = driver.plan(slices)
    driver.take(slices, plan, group.execute(plan))


@pytest.mark.parametrize("tp", [1, 2])
def test_it_knows_the_capital_of_france(tp: int, smollm2: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    prompt = tokenizer.encode(QUESTION, add_special_tokens=False).ids
    assert len(prompt) == 37
    with WorkerGroup(smollm2, tp=tp) as group:
        group.start()
        driver = PlanDriver(block_size=16, num_blocks=64, num_slots=8)
        sequence = driver.admit(prompt)
        step(group, driver, [(sequence, 20)])
        step(group, driver, [(sequence, 17)])
        while sequence.output[-1] != END:
            assert len(sequence.output) < 12, tokenizer.decode(sequence.output)
            step(group, driver, [(sequence, 1)])

    assert tokenizer.decode(sequence.output) == "The capital of France is Paris."


@pytest.mark.slow
def test_mixed_steps_of_many_lengths_give_the_tokens_of_transformers(smollm2: Path) -> None:
    rng = np.random.default_rng(7)
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    text = tokenizer.encode((Path(__file__).parents[2] / "LICENSE").read_text()).ids
    lengths = (1, 2, 15, 16, 17, 64, 130, 400)
    starts = rng.integers(0, len(text) - 700, len(lengths)).tolist()
    prompts = [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    asking = SamplingParams(temperature=0.0, max_tokens=None, seed=0, logprobs=0)
    with WorkerGroup(smollm2, max_num_seqs=9, num_kv_blocks=160) as group:
        group.start()
        driver = PlanDriver(block_size=16, num_blocks=160, num_slots=9)
        running: list[Driven] = []
        for prompt in prompts:
            late = driver.admit(prompt, asking, room=32)
            while late.computed < len(prompt):
                chunk = min(128, len(prompt) - late.computed)
                step(group, driver, [*((one, 1) for one in running), (late, chunk)])
            running.append(late)
        for _ in range(5):
            step(group, driver, [(one, 1) for one in running])

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    for sequence in running:
        with torch.inference_mode():
            logits = model(torch.tensor([sequence.tokens[:-1]])).logits[0]
        logits = logits[len(sequence.prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(sequence.output)[:, None])[:, 0]
        assert float((logits.max(dim=-1).values - chosen).max()) < 1e-3
