"""Pipeline stages change no bit: the same tokens and log-probabilities as with all layers on one.

Random tiny models of three layers, under the real scheduler; what the tokens themselves must be is
checked against transformers in `test_variants` and `tests.worker.test_runner`.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cluster.frontend.grammar_process import GrammarProcess
from cluster.frontend.tokenizer import Tokenizer
from cluster.frontend.tokenizer_files import files_of
from scheduler.replay import replay
from scheduler.request import Finish
from scheduler.sampling import SamplingParams
from stoker import LLM, EngineLost, Handle, RequestError
from tests.system.guided import asked_of, complaints, run_cases
from tests.system.guided_cases import guided_cases
from tests.system.in_process import Answer, InProcessCluster, LoadedRanks
from tests.system.oracle import Oracle
from tests.system.prompts import probes
from tests.system.served import as_answer, greedy
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


def processes(model: Path, pp: int, **settings: object) -> LLM:
    return LLM(
        model,
        backend="local",
        pipeline_parallel_size=pp,
        max_num_seqs=16,
        max_num_batched_tokens=24,
        log_level="warning",
        **settings,
    )


def test_processes_of_two_stages_answer_as_one_stage_does(tied: Path, whole: list[Answer]) -> None:
    asked = [answer.sampling for answer in whole]
    ids = [{"prompt_token_ids": answer.prompt} for answer in whole]
    settings = {"num_kv_blocks": 64, "block_size": 8, "max_model_len": 128}
    with processes(tied, 2, **settings) as llm:
        (group,) = llm.client.status().groups
        outputs = llm.generate(ids, asked, use_tqdm=False)

    assert [rank.state for rank in group.ranks] == ["ready", "ready"]
    for output, one, wanted in zip(outputs, asked, whole, strict=True):
        found = as_answer(output, one)
        assert found.tokens == wanted.tokens
        assert found.logprobs == wanted.logprobs


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_killed_stage_is_named_to_those_who_wait(tied: Path, stage: int) -> None:
    with processes(tied, 3, num_kv_blocks=64, max_model_len=256, max_restarts=0) as llm:
        asked = greedy(200, ignore_eos=True)
        handles = [llm.client.submit({"prompt_token_ids": [5, at]}, asked) for at in range(4)]
        for handle in handles:
            next(iter(handle))
        os.kill(llm.client.status().groups[0].ranks[stage].pid, signal.SIGKILL)
        reasons = [why_it_ended(handle) for handle in handles]

    assert all(f"rank {stage} of group 0 failed" in reason for reason in reasons), reasons


def why_it_ended(handle: Handle) -> str:
    """What is said to whoever waits for it, whether its cluster has ended by then or not."""
    try:
        (output,) = handle.result().outputs
    except (EngineLost, RequestError) as error:
        return str(error)
    assert output.finish_reason == "error"
    return output.message


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (1, 3), (2, 2)])
def test_processes_of_several_stages_answer_as_transformers_does(
    tp: int, pp: int, smollm2: Path, tokenizer: Tokenizer, oracle: Oracle
) -> None:
    prompts = probes(tokenizer) * 2
    asked = [greedy(8, logprobs=2, ignore_eos=True)] * (len(prompts) // 2)
    asked += [
        SamplingParams(seed=at, temperature=0.8, top_p=0.95, max_tokens=8, ignore_eos=True)
        for at in range(len(prompts) // 2)
    ]
    settings = {"tensor_parallel_size": tp, "num_kv_blocks": 128, "max_model_len": 1024}
    with processes(smollm2, pp, **settings) as llm:
        ids = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(ids, asked, use_tqdm=False)

    answers = [as_answer(output, one) for output, one in zip(outputs, asked, strict=True)]
    oracle.prepare(answers)
    for answer in answers:
        oracle.check(answer)
        oracle.check_logprobs(answer)


@pytest.mark.slow
@pytest.mark.model
def test_guided_output_is_the_same_in_stages(
    loaded: Callable[..., LoadedRanks], smollm2: Path, tokenizer: Tokenizer
) -> None:
    cases = guided_cases()[::8]
    grammars = GrammarProcess(files_of(smollm2).tokenizer_json)
    asked = [asked_of(case, grammars, seed, max_tokens=32) for seed, case in enumerate(cases)]
    grammars.close()
    found = {}
    for pp in (1, 3):
        cluster = InProcessCluster(loaded(1, pp), num_blocks=1000, max_num_seqs=32)
        found[pp] = run_cases(cluster, tokenizer, cases, asked)
        assert complaints(cases, found[pp], tokenizer) == []

    assert [answer.tokens for answer in found[3]] == [answer.tokens for answer in found[1]]
    assert any(answer.finish is Finish.STOP for answer in found[3])
