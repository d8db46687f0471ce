"""What the worker's tests share."""

from collections.abc import Iterator

import pytest
import torch

from tests.worker.rank_processes import RankProcesses


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankProcesses]:
    """Processes that stand for ranks; started when a test first needs them."""
    processes = RankProcesses()
    yield processes
    processes.close()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch on one thread: tiny operations wait for each other's threads on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
