"""What the tests of the front door share."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """Undo what a command does to this process's log: commands own theirs."""
    root = logging.getLogger("stoker")
    before = (list(root.handlers), root.level, root.propagate)
    yield
    root.handlers, root.level, root.propagate = before
