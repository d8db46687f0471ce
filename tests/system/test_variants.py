"""No circumstance changes a token: issue 2, "What must hold", statements 2 and 3."""

from collections.abc import Callable, Iterator
from itertools import product

import pytest

from cluster.frontend.tokenizer import Tokenizer
from scheduler.replay import replay
from tests.system.in_process import LoadedRanks
from tests.system.oracle import Oracle
from tests.system.prompts import probes
from tests.system.variants import AMPLE_TOKENS, Outcome, Variant, run

pytestmark = pytest.mark.model

TIGHT_TOKENS = 160
"""The longest probe with its output has 100."""

FEW = (
    Variant(budget=512, cache="full", company=31, aborts=True),
    Variant(tp=2, budget=16, plans=1, pool_tokens=TIGHT_TOKENS),
    Variant(tp=3, budget=33, block_size=8, cache="warm"),
)
"""Each circumstance at least once; TOGETHER has each value of each."""

ONE_BY_ONE = (
    Variant(),
    *(Variant(tp=tp) for tp in (2, 3)),
    *(Variant(pp=pp) for pp in (2, 3)),
    Variant(tp=2, pp=2, budget=17, company=16, aborts=True),
    Variant(pp=2, budget=33, cache="full", company=31, aborts=True),
    Variant(pp=2, budget=16, plans=1, pool_tokens=TIGHT_TOKENS),
    Variant(pp=3, budget=17, block_size=8, cache="warm", pool_tokens=AMPLE_TOKENS, company=7),
    Variant(pp=3, budget=64, cache="off", pool_tokens=TIGHT_TOKENS),
    *(Variant(budget=budget) for budget in (16, 17, 33, 512)),
    *(Variant(block_size=size) for size in (8, 32)),
    *(Variant(cache=cache) for cache in ("off", "warm", "full")),
    Variant(pool_tokens=TIGHT_TOKENS),
    Variant(plans=1),
    *(Variant(company=company) for company in (1, 2, 7, 16, 31)),
    Variant(company=31, aborts=True),
)
TOGETHER = tuple(
    Variant(
        tp=tp,
        budget=budget,
        block_size=(8, 16, 32)[at % 3],
        cache=("on", "off", "warm", "full")[at % 4],
        plans=1 + at % 2,
        pool_tokens=TIGHT_TOKENS if at % 5 == 0 else AMPLE_TOKENS,
        company=(0, 31, 7, 16)[at // 2 % 4],
        aborts=at % 3 == 1 and at // 2 % 4 > 0,
    )
    for at, (tp, budget) in enumerate(product((1, 2, 3), (16, 17, 33, 64, 512)))
)

Runs = Callable[[Variant], Outcome]


@pytest.fixture(scope="module")
def outcome_of(loaded: Callable[..., LoadedRanks], tokenizer: Tokenizer) -> Iterator[Runs]:
    """Each variant is run once, for all tests."""
    outcomes: dict[Variant, Outcome] = {}

    def get(variant: Variant) -> Outcome:
        if variant not in outcomes:
            outcomes[variant] = run(loaded(variant.tp, variant.pp), probes(tokenizer), variant)
        return outcomes[variant]

    yield get
    outcomes.clear()


def variants() -> list[object]:
    slow = [pytest.param(v, marks=pytest.mark.slow, id=str(v)) for v in (*ONE_BY_ONE, *TOGETHER)]
    return [*(pytest.param(v, id=str(v)) for v in FEW), *slow]


@pytest.mark.parametrize("variant", variants())
def test_greedy_output_is_the_references_under(
    variant: Variant, outcome_of: Runs, oracle: Oracle
) -> None:
    outcome = outcome_of(variant)

    oracle.prepare(outcome.answers)
    for answer in outcome.greedy:
        oracle.check(answer)
        oracle.check_logprobs(answer)
    _assert_circumstances(variant, outcome)


def _assert_circumstances(variant: Variant, outcome: Outcome) -> None:
    """What the variant is about did happen."""
    counters, size = outcome.cluster.scheduler.counters, variant.block_size
    is_tight = variant.pool_tokens == TIGHT_TOKENS
    assert counters.preemptions > 0 or not is_tight
    if variant.cache == "off":
        assert counters.cached_tokens == 0
    for answer in () if is_tight else outcome.answers:  # a tight pool keeps no prefix for long
        length = len(answer.prompt)
        if variant.cache == "full":
            assert answer.num_cached == (length - 1) // size * size
        elif variant.cache == "warm":
            assert answer.num_cached >= (length + 1) // 2 // size * size
    assert counters.finished.get("abort", 0) > 0 or not variant.aborts
    assert counters.mixed_steps > 0 or variant.budget > 64


@pytest.mark.parametrize("variant", variants())
def test_sampled_output_is_the_references_under(
    variant: Variant, outcome_of: Runs, oracle: Oracle
) -> None:
    for answer in outcome_of(variant).drawn:
        oracle.check(answer)
        oracle.check_logprobs(answer)


@pytest.mark.parametrize("variant", variants())
def test_a_replay_of_the_journal_plans_the_same_under(variant: Variant, outcome_of: Runs) -> None:
    assert replay(outcome_of(variant).cluster.records) == []
