"""What else a step holds changes no bit: issue 2, statement 3.

On a CPU a token's logits depend on the tokens before it and on how those were cut into slices,
and on nothing else. Another cut (other chunks of a prompt, or what a preempted request computes
again in one piece) goes through torch's attention with another number of rows, which adds up
in another order: there values differ by some 1e-5, and `test_variants` bounds what that does.
"""

from collections.abc import Callable, Sequence

import msgspec
import pytest

from cluster.frontend.tokenizer import Tokenizer
from cluster.wire import TO_ENGINE
from scheduler.plan import StepResult
from scheduler.sampling import SamplingParams
from tests.system.in_process import Answer, InProcessCluster, LoadedRanks
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


@pytest.mark.parametrize(
    ("company", "plans"),
    [pytest.param(*each, marks=pytest.mark.slow) for each in [(31, 2), (0, 1), (0, 2), (31, 1)]],
)
def test_company_and_plans_in_flight_change_no_bit(
    company: int,
    plans: int,
    alone: Outcome,
    loaded: Callable[[int], LoadedRanks],
    tokenizer: Tokenizer,
) -> None:
    variant = Variant(
        tp=2, budget=512, cache="off", company=company, aborts=company > 0, plans=plans
    )
    together = run(loaded(2), prompts(tokenizer), variant)

    same = [
        (one, other)
        for one, other in zip(alone.answers, together.answers, strict=True)
        if one.slices == other.slices
    ]
    assert len(same) >= len(alone.answers) - 2, "the budget was to leave the prompts whole"
    for one, other in same:
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
    return TO_ENGINE.encode(msgspec.structs.replace(result, compute_s=0.0))


@pytest.mark.slow
def test_contexts_of_every_length_decode_side_by_side_without_changing_a_bit(
    loaded: Callable[[int], LoadedRanks], tokenizer: Tokenizer
) -> None:
    """Decodes of similar length are attended to as one batch, padded to the longest."""
    lengths = (5, 17, 40, 130, 400, 500, 520, 600)
    asked = SamplingParams(temperature=0.0, seed=0, max_tokens=10, logprobs=0, ignore_eos=True)

    def answer(chosen: Sequence[int]) -> list[Answer]:
        cluster = InProcessCluster(
            loaded(1), num_blocks=200, max_num_batched_tokens=640, enable_prefix_caching=False
        )
        answers = []
        for length in chosen:
            answers.append(cluster.submit(passage(tokenizer, length, start=2 * length), asked))
            cluster.step()  # so that each prompt is one slice
        cluster.run()
        return answers

    together = answer(lengths)
    for length, beside in zip(lengths, together, strict=True):
        (alone,) = answer([length])
        assert beside.slices == alone.slices
        assert beside.logprobs == alone.logprobs
