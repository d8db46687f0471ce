"""Marks and limits of tests on several machines."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
TIMEOUT_S = 600
"""For each test: every part of it has a limit of its own."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.nodes)
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
