"""What both schedulers are given, ours and vLLM's. Needs nothing that either lacks."""

import numpy as np

RUNNING = (32, 128, 256, 1024)
STEPS = {32: 400, 128: 400, 256: 300, 1024: 150}
"""Timed steps at each number of running sequences."""
ADMITTED, PROMPT_LEN = 1024, 1000
HASHED_LEN = 32768
BUDGET = 8192
"""Tokens per step."""
NUM_BLOCKS = 100_000


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    chance = np.random.default_rng(seed)
    return [chance.integers(1000, 31000, length).tolist() for _ in range(count)]
