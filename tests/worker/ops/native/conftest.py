"""The native set of operations on every level that this machine runs."""

from collections.abc import Iterator

import pytest
import torch

from worker.ops.cpu import CpuOperations
from worker.ops.native.team import levels

LEVELS = levels()


@pytest.fixture(autouse=True)
def _inference_on_one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=LEVELS)
def ops(request: pytest.FixtureRequest) -> Iterator[CpuOperations]:
    """One thread."""
    made = CpuOperations(1, request.param)
    yield made
    made.team.close()


@pytest.fixture(scope="session")
def more_threads(ops: CpuOperations) -> Iterator[CpuOperations]:
    """The level of `ops` on three threads, whose bits must be the same."""
    made = CpuOperations(3, ops.team.level)
    yield made
    made.team.close()
