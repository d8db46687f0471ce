"""Ranks die, hang and raise in mid-stream, on the real model and on a tiny one; nobody's answer
changes for it, judged against the same requests, undisturbed and one at a time (case 62).
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.chaos.model import make_tiny_model
from cluster.messages.faults import Fault, InjectFault
from cluster.messages.reports import RankStatus
from scheduler.structured import StructuredOutputs
from stoker import LLM, RequestOutput, SamplingParams
from stoker.chaos.link import ChaosLink
from tests.system.served import greedy, settled

pytestmark = [pytest.mark.slow, pytest.mark.model]

SETTINGS = {
    "backend": "local",
    "tensor_parallel_size": 2,
    "num_kv_blocks": 256,
    "max_model_len": 512,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 16,
    "step_timeout_s": 20.0,
    "no_workers_s": 600.0,
    "longest_restart_pause_s": 0.2,
    "max_restarts": 100,
    "allow_chaos": True,
    "log_level": "info",
}
BACK_S = 300.0
POET = "Write a poem about the sea, and make it long."

ASKED = (
    (POET, greedy(90, ignore_eos=True)),
    (POET, SamplingParams(temperature=1.0, seed=7, max_tokens=90, ignore_eos=True)),
    (
        "Once upon a time " * 20,
        SamplingParams(
            temperature=0.8,
            seed=8,
            top_p=0.9,
            repetition_penalty=1.2,
            presence_penalty=0.5,
            max_tokens=80,
            min_tokens=40,
        ),
    ),
    ("The first hundred primes:", greedy(80, logprobs=3, prompt_logprobs=1, ignore_eos=True)),
    ("A name:", SamplingParams(temperature=1.1, seed=9, n=3, max_tokens=60, ignore_eos=True)),
    (
        "Six numbers with commas between them:",
        SamplingParams(
            temperature=1.0,
            seed=10,
            max_tokens=80,
            structured_outputs=StructuredOutputs(regex="([0-9]{3}, ){15}[0-9]{3}"),
        ),
    ),
)


@pytest.fixture(scope="module")
def tiny(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the same vocabulary, and much quicker."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", smollm2)


@pytest.fixture(scope="module")
def two_groups(tiny: Path) -> Iterator[LLM]:
    with LLM(tiny, num_groups=2, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def one_group(smollm2: Path) -> Iterator[LLM]:
    with LLM(smollm2, num_groups=1, **SETTINGS) as llm:
        yield llm


def told(output: RequestOutput) -> list[object]:
    """All that matters of an answer."""
    kept: list[object] = [output.prompt_logprobs]
    for one in output.outputs:
        kept.append((one.index, one.text, one.token_ids, one.finish_reason, one.logprobs))
    return kept


def undisturbed(llm: LLM) -> list[list[object]]:
    outputs = [llm.client.submit(prompt, sampling).result() for prompt, sampling in ASKED]
    return [told(output) for output in outputs]


def disturbed(llm: LLM, disturb: Callable[[], None]) -> list[list[object]]:
    """The same requests all at once; `disturb` comes when each has begun to answer."""
    handles = [llm.client.submit(prompt, sampling) for prompt, sampling in ASKED]
    for handle in handles:
        next(iter(handle))
    disturb()
    return [told(handle.result()) for handle in handles]


def rank_of(llm: LLM, group: int, rank: int) -> RankStatus:
    return llm.client.status().groups[group].ranks[rank]


def wait_until_all_serve(llm: LLM) -> None:
    deadline = time.monotonic() + BACK_S
    while not all(group.state == "ready" for group in llm.client.status().groups):
        assert time.monotonic() < deadline, llm.client.status()
        time.sleep(0.1)
    settled(llm.client)


def inject(llm: LLM, fault: Fault, group: int, rank: int) -> None:
    with ChaosLink(llm.address) as link:
        link.inject(InjectFault(fault=fault, group=group, rank=rank))


def kill(llm: LLM, *ranks: tuple[int, int]) -> None:
    for pid in [rank_of(llm, group, rank).pid for group, rank in ranks]:
        os.kill(pid, signal.SIGKILL)


FAULTS: dict[str, Callable[[LLM], None]] = {
    "a rank is killed": lambda llm: kill(llm, (0, 1)),
    "the rank that answers is killed": lambda llm: kill(llm, (0, 0)),
    "all ranks are killed": lambda llm: kill(llm, (0, 0), (0, 1)),
    "a rank is frozen": lambda llm: os.kill(rank_of(llm, 0, 1).pid, signal.SIGSTOP),
    "a rank raises": lambda llm: inject(llm, Fault(kind="raise"), 0, 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_streams_go_on_as_if_nothing_had_been_when(fault: str, one_group: LLM) -> None:
    wanted = undisturbed(one_group)
    before = one_group.client.status().groups[0].num_restarts

    assert disturbed(one_group, lambda: FAULTS[fault](one_group)) == wanted
    wait_until_all_serve(one_group)
    assert one_group.client.status().groups[0].num_restarts == before + 1


@pytest.mark.parametrize("fault", FAULTS)
def test_another_group_takes_the_streams_over_when(fault: str, two_groups: LLM) -> None:
    wanted = undisturbed(two_groups)

    assert disturbed(two_groups, lambda: FAULTS[fault](two_groups)) == wanted
    wait_until_all_serve(two_groups)


def test_streams_go_on_when_both_groups_die_at_once(two_groups: LLM) -> None:
    wanted = undisturbed(two_groups)

    assert disturbed(two_groups, lambda: kill(two_groups, (0, 1), (1, 0))) == wanted
    wait_until_all_serve(two_groups)


def test_a_group_that_has_come_back_answers_as_the_one_before(one_group: LLM) -> None:
    wanted = undisturbed(one_group)
    kill(one_group, (0, 0))
    assert undisturbed(one_group) == wanted
