"""Every request is preempted and says the same: issue 2, statement 2; case 40."""

from collections.abc import Callable

import pytest

from cluster.frontend.tokenizer import Tokenizer
from scheduler.request import Finish
from scheduler.sampling import SamplingParams
from tests.system.in_process import Answer, InProcessCluster, LoadedRanks
from tests.system.oracle import Oracle
from tests.system.prompts import probes
from tests.system.variants import GREEDY, sampled

pytestmark = pytest.mark.model


def preempt_once(ranks: LoadedRanks, prompt: list[int], asked: SamplingParams) -> Answer:
    """Answer `prompt` beside an older request that grows until only one of the two has room."""
    size = 8
    elder_blocks = 2
    num_blocks = -(-(len(prompt) + 4) // size) + elder_blocks + 1
    cluster = InProcessCluster(
        ranks, num_blocks=num_blocks, block_size=size, max_num_batched_tokens=128, watermark=0.0
    )
    room = num_blocks * size
    elder = cluster.submit(
        list(range(100, 100 + elder_blocks * size)),
        SamplingParams(temperature=0.0, seed=0, max_tokens=room, ignore_eos=True),
    )
    # Late enough for the elder to need the next block before this request is done.
    while len(elder.tokens) < 1:
        cluster.step()
    answer = cluster.submit(prompt, asked)

    def make_way() -> None:
        if cluster.scheduler.counters.preemptions and elder.finish is Finish.NOT_YET:
            cluster.abort(elder)

    cluster.run(make_way)
    return answer


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_preempted_request_says_what_it_would_have_said(
    tp: int, loaded: Callable[[int], LoadedRanks], tokenizer: Tokenizer, oracle: Oracle
) -> None:
    answers = []
    for seed, prompt in enumerate(probes(tokenizer)[tp - 1 :: 2]):
        asked = sampled(seed) if seed % 2 else GREEDY
        answers.append(preempt_once(loaded(tp), prompt, asked))

    assert all(answer.num_preemptions > 0 for answer in answers)
    oracle.prepare(answers)
    for answer in answers:
        assert len(answer.tokens) == GREEDY.max_tokens
        oracle.check(answer)
        oracle.check_logprobs(answer)
