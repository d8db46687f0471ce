"""One real `stoker serve` for all tests of HTTP that leave it as they found it."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from stoker import Client
from tests.system.api.serving import Serving
from tests.system.served import settled


@pytest.fixture(scope="session")
def served(smollm2: Path) -> Iterator[Serving]:
    """The real model on one rank, with a key. Tests that kill or freeze start their own."""
    with Serving(smollm2) as serving:
        yield serving.wait_up()


@pytest.fixture(scope="session")
def engine_client(served: Serving) -> Iterator[Client]:
    """A client of the engine itself, for its status and for what HTTP should agree with."""
    with Client(served.address) as client:
        yield client


@pytest.fixture
def http(served: Serving, engine_client: Client) -> Iterator[httpx.Client]:
    """Bears the key. Nothing of the test may be left in the engine after it."""
    with served.http() as http:
        yield http
        settled(engine_client)
