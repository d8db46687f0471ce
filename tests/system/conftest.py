"""What the end-to-end tests share: the reference, the tokenizer, and loaded ranks."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from cluster.frontend.tokenizer import Tokenizer
from stoker import LLM, Client
from tests.system.in_process import LoadedRanks
from tests.system.oracle import Oracle
from tests.system.served import settled

HERE = Path(__file__).parent
TIMEOUT_S = 600
"""For each test: a busy machine may take several times as long as a quiet one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def oracle(smollm2: Path) -> Iterator[Oracle]:
    reference = Oracle(smollm2)
    yield reference
    reference.close()


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_directory(smollm2)


@pytest.fixture(scope="session")
def loaded(smollm2: Path) -> Iterator[Callable[..., LoadedRanks]]:
    """The ranks of a tensor- and a pipeline-parallel size, loaded when first asked for."""
    threads = torch.get_num_threads()
    by_size: dict[tuple[int, int], LoadedRanks] = {}

    def get(tp: int, pp: int = 1) -> LoadedRanks:
        if (tp, pp) not in by_size:
            by_size[tp, pp] = LoadedRanks(smollm2, tp, pp)
        return by_size[tp, pp]

    yield get
    for ranks in by_size.values():
        ranks.close()
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def llm(smollm2: Path) -> Iterator[LLM]:
    """The real model on two ranks, in processes of its own. Tests leave it as they found it."""
    with LLM(
        smollm2,
        backend="local",
        tensor_parallel_size=2,
        num_kv_blocks=128,
        max_model_len=1024,
        max_num_seqs=64,
        max_num_batched_tokens=128,
        log_level="warning",
    ) as llm:
        yield llm


@pytest.fixture
def client(llm: LLM) -> Iterator[Client]:
    """A client of that cluster; nothing of the test may be left in the engine after it."""
    with Client(llm.address) as client:
        yield client
        settled(client)
