"""Neither what else a step holds nor how a sequence is cut into slices changes a bit.

On a CPU a token's logits depend on the tokens before it and on nothing else, for a given number of
ranks (another number adds partial sums of another shape: `test_variants` bounds what that does).
"""

from collections.abc import Callable

import msgspec
import pytest

from cluster.frontend.tokenizer import Tokenizer
from cluster.wire import TO_ENGINE
from scheduler.plan import StepResult
from scheduler.sampling import SamplingParams
from tests.system.in_process import InProcessCluster, LoadedRanks
from tests.system.prompts import passage, probes
from tests.system.variants import GREEDY, Outcome, Variant, run, sampled

pytestmark = pytest.mark.model


def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    return probes(tokenizer)[1::2]


@pytest.fixture(scope="module")
def alone(loaded: Callable[[int], LoadedRanks], tokenizer: Tokenizer) -> Outcome:
    """Each probe had the cluster for itself."""
    greedy, drawn = [], []
    for seed, prompt in enumerate(prompts(tokenizer)):
        for asked, answers in ((GREEDY, greedy), (sampled(seed), drawn)):
            cluster = InProcessCluster(
                loaded(2), num_blocks=64, max_num_batched_tokens=512, enable_prefix_caching=False
            )
            answers.append(cluster.submit(prompt, asked))
            cluster.run()
    return Outcome(greedy, drawn, cluster)


VARIANTS = (
    Variant(tp=2, budget=33, company=31, aborts=True),
    Variant(tp=2, budget=16, block_size=8, plans=1),
    Variant(tp=2, budget=17, block_size=32, cache="warm"),
    Variant(tp=2, budget=512, cache="full", company=7),
    Variant(tp=2, budget=64, pool_tokens=160, cache="off"),
    Variant(tp=2, pp=2, budget=33, company=31, aborts=True),
    Variant(tp=2, pp=3, budget=16, block_size=8, pool_tokens=160),
)


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, id=str(variant), marks=[pytest.mark.slow] if index else [])
        for index, variant in enumerate(VARIANTS)
    ],
)
def test_no_company_and_no_cut_changes_a_bit(
    variant: Variant,
    alone: Outcome,
    loaded: Callable[..., LoadedRanks],
    tokenizer: Tokenizer,
) -> None:
    found = run(loaded(2, variant.pp), prompts(tokenizer), variant)

    if variant.pool_tokens < 1000:
        assert found.cluster.scheduler.counters.preemptions > 0
    for one, other in zip(alone.answers, found.answers, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == other.logprobs


@pytest.mark.slow
def test_running_the_same_plans_again_gives_the_same_bits(
    loaded: Callable[[int], LoadedRanks], tokenizer: Tokenizer
) -> None:
    """Long contexts, chunks, a preemption, sampling and log-probabilities among them."""
    cluster = InProcessCluster(loaded(2), num_blocks=12, max_num_batched_tokens=96, watermark=0.0)
    for seed in range(3):
        cluster.submit(passage(tokenizer, 50, start=300 * seed), sampled(seed, max_tokens=20))
    cluster.submit(
        passage(tokenizer, 20), SamplingParams(seed=9, max_tokens=8, prompt_logprobs=3, top_k=50)
    )
    cluster.run()
    assert cluster.scheduler.counters.preemptions > 0

    again = cluster.run_again()

    assert len(again) == len(cluster.results) > 20
    for first, second in zip(cluster.results, again, strict=True):
        assert timeless(first) == timeless(second)


def timeless(result: StepResult) -> bytes:
    return TO_ENGINE.encode(msgspec.structs.replace(result, compute_s=0.0, forward_s=0.0))
