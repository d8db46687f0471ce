"""The judge of all other tests here condemns what is wrong."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from cluster.frontend.tokenizer import Tokenizer
from tests.system.in_process import Answer, LoadedRanks
from tests.system.oracle import Oracle
from tests.system.prompts import OPENINGS
from tests.system.variants import Variant, run

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def right(loaded: Callable[[int], LoadedRanks], tokenizer: Tokenizer) -> list[Answer]:
    """One greedy and one sampled answer."""
    return run(loaded(2), [tokenizer.encode(OPENINGS[0])], Variant()).answers


def test_right_answers_pass_and_chance_is_not_greed(right: list[Answer], oracle: Oracle) -> None:
    for answer in right:
        oracle.check(answer)
        oracle.check_logprobs(answer)
    assert right[0].tokens != right[1].tokens


def test_a_wrong_token_anywhere_is_condemned(right: list[Answer], oracle: Oracle) -> None:
    for answer in right:
        for at in range(len(answer.tokens)):
            tokens = [*answer.tokens[:at], 777, *answer.tokens[at + 1 :]]
            with pytest.raises(AssertionError, match=f"output token {at} "):
                oracle.check(replace(answer, tokens=tokens, logprobs={}))


def test_another_seed_is_condemned(right: list[Answer], oracle: Oracle) -> None:
    drawn = right[1]
    other = type(drawn.sampling)(temperature=0.8, top_p=0.95, seed=12345, max_tokens=8)
    with pytest.raises(AssertionError, match="the number"):
        oracle.check(replace(drawn, sampling=other))


def test_a_log_probability_that_is_off_is_condemned(right: list[Answer], oracle: Oracle) -> None:
    answer = right[0]
    position, row = next(iter(answer.logprobs.items()))
    token, value = next(iter(row.items()))
    wrong = answer.logprobs | {position: row | {token: value + 0.01}}
    with pytest.raises(AssertionError, match="log-probability"):
        oracle.check_logprobs(replace(answer, logprobs=wrong))
