"""What all tests share: the model, the check for leftovers, and how hypothesis searches."""

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.leaks import Footprint

ROOT = Path(__file__).resolve().parent.parent
MODELS_DIR = Path(os.environ.get("STOKER_MODELS_DIR", ROOT / "models"))

settings.register_profile(
    "stoker", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("ci", settings.get_profile("stoker"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "stoker")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the SmolLM2 checkpoint, fetched first if it is not there. Mark: `model`."""
    from cluster.models import fetch  # loads gguf, which tests without a model need not

    return fetch("smollm2", MODELS_DIR)


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fail the test if a process that it started, or a file in /dev/shm, outlives it."""
    before = Footprint.now()
    yield
    leftovers = before.leftovers()
    assert not leftovers, "the test left behind:\n" + "\n".join(leftovers)


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """No test sees what another one had `show_events` do."""
    root = logging.getLogger("stoker")
    handlers, level, propagate = list(root.handlers), root.level, root.propagate
    yield
    root.handlers, root.propagate = handlers, propagate
    root.setLevel(level)


def pytest_collection_finish() -> None:
    """What is loaded by now stays, so that nobody need look through it for garbage again: that
    was a tenth of the time of tests that start no processes."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out tests for a GPU, for a browser, or on several machines where there are none: they
    are not skipped, but not there."""
    if any("gpu" in item.keywords for item in items):
        import torch

        if not torch.cuda.is_available():
            items[:] = [item for item in items if item.get_closest_marker("gpu") is None]
    if any("browser" in item.keywords for item in items):
        from tests.browser import chromium

        if chromium() is None:
            items[:] = [item for item in items if item.get_closest_marker("browser") is None]
    if any("nodes" in item.keywords for item in items):
        from tests.nodes.rig import can_make_machines

        if not can_make_machines():
            items[:] = [item for item in items if item.get_closest_marker("nodes") is None]
