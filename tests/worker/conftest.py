"""What the worker's tests share."""

from collections.abc import Iterator

import pytest

from tests.worker.rank_processes import RankProcesses


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankProcesses]:
    """Processes that stand for ranks; started when a test first needs them."""
    processes = RankProcesses()
    yield processes
    processes.close()
