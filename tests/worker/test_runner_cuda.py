"""A whole runner on the `cuda` set, its decode graphs included, against transformers.

Without a GPU Triton's interpreter runs the kernels and a fake replays the graphs.
"""

from pathlib import Path

import pytest
import torch

from tests.worker.groups import WorkerGroup
from tests.worker.ops.interpreted import HAS_GPU
from tests.worker.test_graphs import FakeCapture
from tests.worker.test_runner import assert_greedy, generate, make_driver, random_prompt
from tests.worker.tiny_models import save_model
from worker import runner
from worker.ops.cuda import CudaOperations

pytestmark = pytest.mark.slow


class CountedCapture(FakeCapture):
    """Every graph's replays in one list, whoever made it."""

    captures: list["CountedCapture"]

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.captures.append(self)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[CountedCapture]:
    """Have runners use the `cuda` set and graphs here; the captures they made."""
    CountedCapture.captures = []
    if not HAS_GPU:
        monkeypatch.setattr(runner, "make_operations", lambda *_: CudaOperations())
        monkeypatch.setattr(runner, "CudaCapture", CountedCapture)
        monkeypatch.setattr(runner.ModelRunner, "_uses_graphs", True)
    return CountedCapture.captures


def cuda_group(folder: Path) -> WorkerGroup:
    device = {"device": "cuda", "ops": "cuda"} if HAS_GPU else {}
    return WorkerGroup(folder, max_num_seqs=3, max_num_batched_tokens=16, **device)


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_mixed_steps_and_graphs_compute_what_transformers_does(
    name: str, tmp_path: Path, captures: list[CountedCapture]
) -> None:
    model, folder = save_model(name, tmp_path)
    with cuda_group(folder) as group:
        driver = make_driver(group)
        sequences = [driver.admit(random_prompt(length, seed=length)) for length in (25, 3)]

        generate(group, driver, sequences, tokens=4, budget=12)

    for sequence in sequences:
        assert_greedy(model, sequence)
    if not HAS_GPU:
        assert captures[-1].replayed, "pure decode steps are replayed"
