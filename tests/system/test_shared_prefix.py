"""What is computed once is computed once: issue 2, statement 5; cases 36, 38, 96 and 128."""

from collections.abc import Callable

import pytest

from cluster.frontend.tokenizer import Tokenizer
from scheduler.sampling import SamplingParams
from tests.system.in_process import Answer, InProcessCluster, LoadedRanks
from tests.system.oracle import Oracle
from tests.system.prompts import passage

pytestmark = pytest.mark.model

PREFIX, NUM = 512, 32
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=2, ignore_eos=True, logprobs=0)


def test_32_requests_compute_their_512_token_prefix_once_and_a_second_batch_hits_fully(
    loaded: Callable[[int], LoadedRanks], tokenizer: Tokenizer, oracle: Oracle
) -> None:
    prefix = passage(tokenizer, PREFIX)
    prompts = [[*prefix, 1000 + 17 * at, 2000 + 19 * at] for at in range(NUM)]
    cluster = InProcessCluster(
        loaded(2), num_blocks=160, max_num_seqs=NUM, max_num_batched_tokens=128
    )
    counters = cluster.scheduler.counters

    first = [cluster.submit(prompt, GREEDY) for prompt in prompts]
    cluster.run()
    assert counters.prefill_tokens == PREFIX + NUM * 2
    assert counters.cached_tokens == (NUM - 1) * PREFIX
    assert sorted(answer.num_cached for answer in first) == [0] + [PREFIX] * (NUM - 1)

    second = [cluster.submit(prompt, GREEDY) for prompt in prompts]
    cluster.run()
    assert [answer.num_cached for answer in second] == [PREFIX] * NUM
    assert counters.prefill_tokens == PREFIX + 2 * NUM * 2
    assert counters.preemptions == 0

    some = [first[0], first[1], *second[:2]]
    oracle.prepare(some)
    for answer in some:
        oracle.check(answer)
        oracle.check_logprobs(answer)
    assert [a.tokens for a in first] == [a.tokens for a in second]


@pytest.mark.parametrize("length", [16, 32, 48])
def test_a_wholly_cached_prompt_computes_its_last_block_and_stays_reusable(
    length: int, loaded: Callable[[int], LoadedRanks], tokenizer: Tokenizer, oracle: Oracle
) -> None:
    """Case 38: prompts of whole blocks, three times, then a longer one."""
    cluster = InProcessCluster(loaded(2), num_blocks=32)
    prompt = passage(tokenizer, length, start=700)

    def ask(tokens: list[int]) -> Answer:
        answer = cluster.submit(tokens, GREEDY)
        cluster.run()
        return answer

    answers = [ask(prompt) for _ in range(3)]
    longer = ask([*prompt, *range(500, 520)])

    assert [answer.num_cached for answer in answers] == [0, length - 16, length - 16]
    assert longer.num_cached == length
    oracle.prepare([*answers, longer])
    for answer in (*answers, longer):
        oracle.check(answer)
        oracle.check_logprobs(answer)


def test_a_cached_prefix_serves_only_its_own_salt(
    loaded: Callable[[int], LoadedRanks], tokenizer: Tokenizer
) -> None:
    """Case 128: whether a prompt is cached tells nothing to another tenant."""
    cluster = InProcessCluster(loaded(2), num_blocks=32)
    prompt = passage(tokenizer, 40)

    def cached(salt: str | None) -> int:
        answer = cluster.submit(prompt, GREEDY, cache_salt=salt)
        cluster.run()
        return answer.num_cached

    assert [cached(None), cached("a"), cached("b")] == [0, 0, 0]
    assert [cached(None), cached("a"), cached("b")] == [32, 32, 32]
