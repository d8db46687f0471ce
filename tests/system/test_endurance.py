"""Thousands of short requests leave nothing behind: issue 2, statement 9; case 65."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from cluster.messages.reports import Status
from stoker import LLM, Client, InvalidRequest
from tests.system.served import greedy, settled
from tests.worker.tiny_models import save_model

MIB = 1 << 20
SETTINGS = {
    "backend": "local",
    "tensor_parallel_size": 2,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 32,
    "num_kv_blocks": 24,
    "block_size": 4,
    "max_model_len": 200,
    "log_level": "error",
}
AT_ONCE = 100
NUM_WARM, NUM = 1000, 2000
"""oneDNN makes a kernel for each shape it first meets; after so many few are new."""


@pytest.fixture(params=["tiny", "smollm2"])
def worn(
    request: pytest.FixtureRequest, smollm2: Path, tmp_path: Path, no_leaks: None
) -> Iterator[LLM]:
    folder = smollm2 if request.param == "smollm2" else save_model("llama", tmp_path)[1]
    with LLM(folder, **SETTINGS) as llm:
        yield llm


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_case_65_2000_short_requests_of_every_fate_leave_memory_flat_and_all_maps_empty(
    worn: LLM,
) -> None:
    load = Load(worn)
    load.run(NUM_WARM)
    family = family_of(settled(worn.client))
    before = [process.memory_info().rss for process in family]
    first = worn.client.status().totals

    load.run(NUM)

    status = settled(worn.client, num_clients=1)
    finished = {
        name: count - first.finished.get(name, 0) for name, count in status.totals.finished.items()
    }
    for fate in ("length", "abort", "timeout"):
        assert finished[fate] > NUM // 20, finished
    assert status.totals.num_rejected > first.num_rejected
    assert status.totals.num_preemptions > 0
    accepted = status.totals.num_requests - first.num_requests
    assert accepted == sum(finished.values())
    growth = [p.memory_info().rss - was for p, was in zip(family, before, strict=True)]
    names = [" ".join(process.cmdline())[-60:] for process in family]
    assert max(growth) < 6 * MIB, dict(zip(names, growth, strict=True))


def family_of(status: Status) -> list[psutil.Process]:
    """Supervisor, engine and ranks."""
    supervisor = psutil.Process(status.groups[0].ranks[0].pid).parent()
    return [supervisor, *supervisor.children(recursive=True)]


class Load:
    """Requests that end by length, by an abort before or after their start, late, or refused."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._rng = np.random.default_rng(65)

    def run(self, count: int) -> None:
        for _ in range(count // AT_ONCE):
            with Client(self._llm.address) as client:
                self._burst(client)
            settled(self._llm.client)

    def _burst(self, client: Client) -> None:
        handles = []
        for fate in self._rng.integers(5, size=AT_ONCE).tolist():
            length = 170 if fate == 4 else int(self._rng.integers(1, 7))
            prompt = {"prompt_token_ids": self._rng.integers(3, 97, length).tolist()}
            asked = greedy(int(self._rng.integers(1, 4)), ignore_eos=True)
            if fate == 3:
                asked = greedy(12, ignore_eos=True)
            timeout_s = 0.001 if fate == 2 else None
            handle = client.submit(prompt, asked, timeout_s=timeout_s)
            handles.append(handle)
            if fate == 1:
                handle.cancel()
            if fate == 3 and len(handles) % 2:
                next(iter(handle))
                handle.cancel()
        num_refused = 0
        for handle in handles:
            try:
                assert handle.result(60.0).finished
            except InvalidRequest as error:
                assert "num_kv_blocks" in str(error)  # noqa: PT017  # only some are refused
                num_refused += 1
        assert num_refused > 0
