"""Pipeline stages change no bit: the same tokens and log-probabilities as with all layers on one.

Random tiny models of three layers, under the real scheduler; what the tokens themselves must be is
checked against transformers in `test_variants` and `tests.worker.test_runner`.
"""

from pathlib import Path

import numpy as np
import pytest

from scheduler.replay import replay
from scheduler.request import Finish
from scheduler.sampling import SamplingParams
from tests.system.in_process import Answer, InProcessCluster, LoadedRanks
from tests.worker.tiny_models import VOCAB_SIZE, save_model

NUM_OUTPUT = 12
ROOMY = 4096
TIGHT = 120
"""Tokens in the pool; the longest request has 92."""

ASKED = (
    SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, seed=0, logprobs=3, ignore_eos=True),
    SamplingParams(seed=5, max_tokens=NUM_OUTPUT, top_p=0.9, logprobs=0, ignore_eos=True),
    SamplingParams(
        temperature=0.0,
        max_tokens=NUM_OUTPUT,
        seed=0,
        repetition_penalty=1.4,
        frequency_penalty=0.3,
        prompt_logprobs=2,
        ignore_eos=True,
    ),
    SamplingParams(seed=7, max_tokens=4, top_k=20, presence_penalty=0.5, logprobs=1),
)


def load(folder: Path, tp: int, pp: int) -> LoadedRanks:
    return LoadedRanks(folder, tp, pp, max_model_len=128)


def prompts() -> list[list[int]]:
    """Some begin alike, so that they share blocks of the cache."""
    rng = np.random.default_rng(3)
    stem = rng.integers(3, VOCAB_SIZE, 40).tolist()
    lengths = (1, 2, 9, 17, 33, 60, 80)
    own = [rng.integers(3, VOCAB_SIZE, length).tolist() for length in lengths]
    return own + [stem[:36] + tail[:9] for tail in own[2:5]]


def answers_of(
    ranks: LoadedRanks, *, budget: int = 24, pool: int = ROOMY, aborts: bool = False
) -> tuple[list[Answer], InProcessCluster]:
    cluster = InProcessCluster(
        ranks,
        num_blocks=pool // 8,
        block_size=8,
        max_num_batched_tokens=budget,
        watermark=0.0,
    )
    answers = [cluster.submit(prompt, asked) for asked in ASKED for prompt in prompts()]
    victims = answers[3::5] if aborts else []

    def abort_one() -> None:
        if victims and cluster.num_steps % 3 == 2:
            victim = victims.pop()
            if victim.finish is Finish.NOT_YET:
                cluster.abort(victim)

    cluster.run(abort_one)
    return answers, cluster


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama_tied", tmp_path_factory.mktemp("tied"))[1]


@pytest.fixture(scope="module")
def whole(tied: Path) -> list[Answer]:
    """What one stage says."""
    ranks = load(tied, 1, 1)
    answers, _ = answers_of(ranks, budget=512)
    ranks.close()
    return answers


def assert_same(found: list[Answer], wanted: list[Answer]) -> None:
    assert any(len(answer.logprobs) > NUM_OUTPUT for answer in wanted), "no prompt was scored"
    for one, other in zip(found, wanted, strict=True):
        if one.finish is Finish.ABORT:
            assert one.tokens == other.tokens[: len(one.tokens)]
            continue
        assert one.finish == other.finish
        assert one.tokens == other.tokens
        assert one.logprobs == other.logprobs


@pytest.mark.parametrize("pp", [2, 3])
def test_stages_answer_as_one_does_with_prompts_in_chunks_and_a_shared_cache(
    tied: Path, whole: list[Answer], pp: int
) -> None:
    ranks = load(tied, 1, pp)
    found, cluster = answers_of(ranks)
    ranks.close()

    assert [runner._stage.layers.size for runner in cluster.runners] == {2: [2, 1], 3: [1, 1, 1]}[
        pp
    ]
    assert cluster.scheduler.counters.cached_tokens > 0
    assert cluster.scheduler.counters.mixed_steps > 0
    assert_same(found, whole)
    assert replay(cluster.records) == []


def test_stages_answer_as_one_does_through_preemptions_and_aborts(
    tied: Path, whole: list[Answer]
) -> None:
    ranks = load(tied, 1, 2)
    found, cluster = answers_of(ranks, pool=TIGHT, aborts=True)
    ranks.close()

    assert cluster.scheduler.counters.preemptions > 0
    assert cluster.scheduler.counters.finished["abort"] > 0
    assert_same(found, whole)
    assert replay(cluster.records) == []


def test_no_stage_computes_a_token_that_nobody_wants(tied: Path) -> None:
    """A sequence is in one plan at a time once it samples, so none is computed after its end."""
    ranks = load(tied, 1, 2)
    _, cluster = answers_of(ranks)
    ranks.close()

    assert cluster.scheduler.counters.dropped_tokens == 0
    assert max(len(plan.slot) for plan in cluster.plans) > 1


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize(
    "name", ["llama", "llama_tied", "llama_biased", "mistral", "qwen2_windowed", "qwen3_biased"]
)
def test_every_architecture_is_the_same_in_stages(
    name: str, tp: int, pp: int, tmp_path: Path
) -> None:
    _, folder = save_model(name, tmp_path)
    outcomes = []
    for stages, budget, pool in ((1, 512, ROOMY), (pp, 19, ROOMY), (pp, 64, TIGHT)):
        ranks = load(folder, tp, stages)
        outcomes.append(answers_of(ranks, budget=budget, pool=pool)[0])
        ranks.close()

    wanted, *others = outcomes
    for found in others:
        assert_same(found, wanted)
