"""60 prompts in one continuous batch say what transformers says: issue 2, statement 1."""

from collections.abc import Callable

import pytest

from cluster.frontend.tokenizer import Tokenizer
from scheduler.request import Finish
from scheduler.sampling import SamplingParams
from tests.system.in_process import END, Answer, InProcessCluster, LoadedRanks
from tests.system.oracle import Oracle
from tests.system.prompts import sixty

pytestmark = pytest.mark.model

MAX_TOKENS = 12
NUM_FIRST = 20
"""Prompts that are there at the start; the others come one a step."""


@pytest.fixture(scope="module")
def cluster(loaded: Callable[[int], LoadedRanks], tokenizer: Tokenizer) -> InProcessCluster:
    """Two ranks that have answered all prompts, the long ones in chunks among the others."""
    cluster = InProcessCluster(
        loaded(2), num_blocks=400, max_num_seqs=60, max_num_batched_tokens=256
    )
    coming = sixty(tokenizer)[::-1]  # the longest at the start

    def arrive() -> None:
        for prompt in coming[: NUM_FIRST if not cluster.answers else 1]:
            asked = 2 if 60 <= len(prompt) <= 130 else None
            cluster.submit(
                prompt,
                SamplingParams(
                    temperature=0.0,
                    seed=0,
                    max_tokens=MAX_TOKENS,
                    logprobs=3,
                    prompt_logprobs=asked,
                ),
            )
            coming.remove(prompt)

    arrive()
    cluster.run(arrive)
    assert not coming
    return cluster


@pytest.fixture(scope="module")
def answers(cluster: InProcessCluster, oracle: Oracle) -> list[Answer]:
    answers = list(cluster.answers.values())
    oracle.prepare(answers)
    return answers


def test_greedy_output_is_transformers_own_token_for_token(
    answers: list[Answer], oracle: Oracle
) -> None:
    assert len(answers) == 60
    assert {len(a.prompt) for a in answers} >= {1, 2, 15, 16, 17, 1500}
    for answer in answers:
        oracle.check(answer)


def test_logprobs_are_transformers_own(answers: list[Answer], oracle: Oracle) -> None:
    for answer in answers:
        last = len(answer.prompt) + len(answer.tokens)
        asks_all = answer.sampling.prompt_logprobs is not None
        assert sorted(answer.logprobs) == list(range(1 if asks_all else len(answer.prompt), last))
        assert all(len(row) in (3, 4) for at, row in answer.logprobs.items() if at >= last)
        oracle.check_logprobs(answer)
    assert sum(a.sampling.prompt_logprobs is not None for a in answers) >= 4


def test_each_output_ends_at_its_end_token_or_at_its_length(answers: list[Answer]) -> None:
    for answer in answers:
        assert END not in answer.tokens[:-1]
        if answer.tokens[-1] == END:
            assert answer.finish is Finish.STOP
        else:
            assert (answer.finish, len(answer.tokens)) == (Finish.LENGTH, MAX_TOKENS)
    assert {a.finish for a in answers} == {Finish.STOP, Finish.LENGTH}


def test_the_batch_was_continuous(cluster: InProcessCluster, answers: list[Answer]) -> None:
    counters = cluster.scheduler.counters
    assert counters.mixed_steps > 10
    assert max(len(plan.slot) for plan in cluster.plans) > 30
    assert max(len(plan.admitted) for plan in cluster.plans) > 1
