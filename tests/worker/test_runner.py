"""A whole worker group, driven by plans, against transformers' own forward pass."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from scheduler.plan import LogprobRows, StepResult
from scheduler.sampling import SamplingParams
from tests.worker.groups import WorkerGroup
from tests.worker.plans import Driven, PlanDriver
from tests.worker.tiny_models import MODELS, VOCAB_SIZE, oracle_logits, save_model
from worker.batch import ON_ITS_WAY
from worker.errors import ModelError, ProtocolError
from worker.runner import ModelRunner

TOLERANCE = 1e-3
"""Of logits and log-probabilities, which here have magnitudes of 1 to 10; float32 sums in
another order differ by some 1e-5."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist()


def make_driver(group: WorkerGroup) -> PlanDriver:
    config = group.runners[0]._config
    num_blocks = group.start().num_blocks
    return PlanDriver(
        block_size=config.block_size,
        num_blocks=num_blocks,
        num_slots=config.max_num_seqs,
        gives_all=config.pipeline_parallel_size > 1,
    )


def run_step(
    group: WorkerGroup, driver: PlanDriver, slices: list[tuple[Driven, int]]
) -> StepResult:
    plan = driver.plan(slices)
    result = group.execute(plan)
    assert (result.epoch, result.step) == (plan.epoch, plan.step)
    driver.take(slices, plan, result)
    return result


def generate(
    group: WorkerGroup, driver: PlanDriver, sequences: list[Driven], *, tokens: int, budget: int
) -> list[StepResult]:
    """Until each has `tokens` of output: running sequences first, then prompts in chunks."""
    results = []
    while any(len(sequence.output) < tokens for sequence in sequences):
        slices: list[tuple[Driven, int]] = []
        left = budget
        by_need = sorted(sequences, key=lambda one: len(one.tokens) - one.computed > 1)
        for sequence in by_need:
            count = min(left, len(sequence.tokens) - sequence.computed)
            if count and len(sequence.output) < tokens:
                slices.append((sequence, count))
                left -= count
        results.append(run_step(group, driver, slices))
    return results


@pytest.mark.parametrize("tp", [1, 2])
def test_a_step_that_begins_before_the_last_one_is_finished_goes_on_with_its_tokens(
    tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRunner, "_runs_ahead", True)
    model, folder = save_model("llama", tmp_path)
    with WorkerGroup(folder, tp=tp) as group:
        driver = make_driver(group)
        sequences = [driver.admit(random_prompt(length, seed=length)) for length in (5, 30)]
        plan = driver.plan([(sequence, len(sequence.prompt)) for sequence in sequences])
        running = group.begin(plan)
        for _ in range(8):
            for sequence in sequences:
                sequence.output.append(ON_ITS_WAY)
            plan = driver.plan([(sequence, 1) for sequence in sequences])
            assert all(runner.can_begin(plan) for runner in group.runners)
            following = group.begin(plan)
            result = group.finish(running)
            for sequence, token in zip(sequences, result.token.tolist(), strict=True):
                sequence.output[-1] = token
            running = following
        group.finish(running)

    for sequence in sequences:
        assert_greedy(model, sequence)


@pytest.mark.parametrize(("ops", "runs_ahead"), [("cpu", False), ("reference", True)])
def test_stages_compute_together_what_the_model_does(
    ops: str, runs_ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also as on a GPU, where a step may begin before the last one is finished."""
    monkeypatch.setattr(ModelRunner, "_runs_ahead", runs_ahead)
    model, folder = save_model("qwen3_windowed", tmp_path)
    asking = SamplingParams(temperature=0.0, max_tokens=None, seed=0, prompt_logprobs=1)
    with WorkerGroup(folder, tp=2, pp=3, ops=ops) as group:
        driver = make_driver(group)
        sequences = [
            driver.admit(random_prompt(length, seed=length), asking) for length in (5, 30, 41)
        ]
        results = generate(group, driver, sequences, tokens=8, budget=24)
        assert [runner._tokens.answers for runner in group.runners] == [
            False, False, False, False, True, False,
        ]  # fmt: skip
        assert all(runner._last_tokens is None for runner in group.runners)

    assert len(results) > 8
    for sequence in sequences:
        assert_greedy(model, sequence)


def test_a_token_that_comes_late_is_not_written_over_the_next_sequence_of_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRunner, "_runs_ahead", True)
    model, folder = save_model("llama", tmp_path)
    with WorkerGroup(folder, max_num_seqs=1) as group:
        driver = make_driver(group)
        first = driver.admit(random_prompt(4, seed=1))
        running = group.begin(driver.plan([(first, 4)]))
        driver.release(first)
        second = driver.admit(random_prompt(9, seed=2))
        following = group.begin(driver.plan([(second, 9)]))
        group.finish(running)
        table = group.runners[0]._table
        assert table is not None
        assert table.tokens[second.slot, :9].tolist() == second.prompt
        second.output.append(int(group.finish(following).token[0]))
        generate(group, driver, [second], tokens=4, budget=8)

    assert_greedy(model, second)


def test_a_sequence_with_penalties_waits_for_its_last_token(tmp_path: Path) -> None:
    _, folder = save_model("llama", tmp_path)
    with WorkerGroup(folder) as group:
        driver = make_driver(group)
        asking = SamplingParams(temperature=0.0, max_tokens=None, presence_penalty=0.5)
        sequence = driver.admit(random_prompt(4, seed=1), asking)
        run_step(group, driver, [(sequence, 4)])
        plan = driver.plan([(sequence, 1)])

        assert not group.runners[0].can_begin(plan)


def assert_greedy(model: PreTrainedModel, sequence: Driven) -> None:
    """Every output token is the oracle's best, or within rounding of it."""
    logits = oracle_logits(model, sequence.tokens)[len(sequence.prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(sequence.output)[:, None])[:, 0]
    assert (logits.max(dim=-1).values - chosen).max() < TOLERANCE, sequence


def logprobs_by_position(results: list[StepResult]) -> dict[int, dict[int, float]]:
    """Of the only sequence that asked: position -> token id -> log-probability."""
    found: dict[int, dict[int, float]] = {}
    for rows in (result.logprobs for result in results):
        if rows is None:
            continue
        ids, values = rows.token.reshape(-1, rows.width), rows.logprob.reshape(-1, rows.width)
        for position, own_ids, own_values in zip(rows.position.tolist(), ids, values, strict=True):
            assert position not in found, f"position {position} was reported twice"
            found[position] = {
                token: value
                for token, value in zip(own_ids.tolist(), own_values.tolist(), strict=True)
                if token >= 0
            }
    return found


def assert_logprobs(
    model: PreTrainedModel, sequence: Driven, found: dict[int, dict[int, float]]
) -> None:
    expected = oracle_logits(model, sequence.tokens).log_softmax(dim=-1)
    for position, by_token in found.items():
        assert sequence.tokens[position] in by_token
        for token, value in by_token.items():
            assert value == pytest.approx(float(expected[position - 1, token]), abs=TOLERANCE)


@pytest.mark.parametrize("ops", ["cpu", "reference"])
@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_computes_what_transformers_does(
    name: str, ops: str, tmp_path: Path
) -> None:
    model, folder = save_model(name, tmp_path)
    with WorkerGroup(folder, ops=ops) as group:
        driver = make_driver(group)
        asking = SamplingParams(
            temperature=0.0, max_tokens=None, seed=0, logprobs=3, prompt_logprobs=2
        )
        long = driver.admit(random_prompt(75, seed=1), asking)
        others = [driver.admit(random_prompt(length, seed=length)) for length in (1, 17, 32)]

        results = generate(group, driver, [long, *others], tokens=8, budget=33)

    for sequence in (long, *others):
        assert_greedy(model, sequence)
    found = logprobs_by_position(results)
    assert sorted(found) == list(range(1, 75 + 8))
    assert_logprobs(model, long, found)


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("name", ["llama_tied", "llama_biased", "mistral", "qwen2", "qwen3_biased"])
def test_uneven_shards_compute_what_the_whole_model_does(
    name: str, tp: int, tmp_path: Path
) -> None:
    model, folder = save_model(name, tmp_path)
    with WorkerGroup(folder, tp=tp) as group:
        driver = make_driver(group)
        asking = SamplingParams(
            temperature=0.0, max_tokens=None, seed=0, logprobs=3, prompt_logprobs=2
        )
        sequences = [driver.admit(random_prompt(40, seed=3), asking)]
        sequences += [driver.admit(random_prompt(length, seed=length)) for length in (1, 23)]

        results = generate(group, driver, sequences, tokens=6, budget=17)

    for sequence in sequences:
        assert_greedy(model, sequence)
    found = logprobs_by_position(results)
    assert sorted(found) == list(range(1, 40 + 6))
    assert_logprobs(model, sequences[0], found)


def test_kv_heads_are_replicated_beyond_their_number(tmp_path: Path) -> None:
    model, folder = save_model("llama", tmp_path)
    with WorkerGroup(folder, tp=6) as group:
        driver = make_driver(group)
        sequence = driver.admit(random_prompt(20, seed=4))
        generate(group, driver, [sequence], tokens=5, budget=64)

    assert_greedy(model, sequence)


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("budget", [16, 17, 33, 64])
def test_neither_chunks_nor_block_size_change_the_tokens(
    block_size: int, budget: int, tmp_path: Path
) -> None:
    model, folder = save_model("llama", tmp_path)
    with WorkerGroup(folder, block_size=block_size, num_kv_blocks=70) as group:
        driver = make_driver(group)
        sequences = [
            driver.admit(random_prompt(length, seed=length), room=24) for length in (50, 3, 31)
        ]
        results = generate(group, driver, sequences, tokens=10, budget=budget)
        late = driver.admit(random_prompt(40, seed=9), room=24)
        results = generate(group, driver, [*sequences, late], tokens=20, budget=budget)

    for sequence in (*sequences, late):
        assert_greedy(model, sequence)
    assert any(len(result.token) for result in results)


def test_a_prefix_written_in_the_same_step_can_be_shared(tmp_path: Path) -> None:
    model, folder = save_model("llama", tmp_path)
    prefix = random_prompt(32, seed=5)
    with WorkerGroup(folder) as group:
        driver = make_driver(group)
        first = driver.admit([*prefix, 1, 2, 3])
        shared = driver.blocks_of(first)[:2]
        # The later slice comes first in the step, so its order cannot help.
        second = driver.admit([*prefix, 4], shared=shared)

        run_step(group, driver, [(second, 1), (first, 35)])
        generate(group, driver, [first, second], tokens=6, budget=64)

    assert_greedy(model, first)
    assert_greedy(model, second)


def test_the_last_token_of_a_prompt_is_scored_also_where_it_comes_alone(tmp_path: Path) -> None:
    _, folder = save_model("llama", tmp_path)
    asking = SamplingParams(temperature=0.0, max_tokens=None, seed=0, prompt_logprobs=0)
    with WorkerGroup(folder) as group:
        driver = make_driver(group)
        sequence = driver.admit(random_prompt(9, seed=6), asking)
        results = [run_step(group, driver, [(sequence, count)]) for count in (8, 1)]

    assert sorted(logprobs_by_position(results)) == list(range(1, 9))


def test_a_preempted_sequence_resumes_with_its_output_given(tmp_path: Path) -> None:
    model, folder = save_model("qwen3", tmp_path)
    asking = SamplingParams(temperature=0.0, max_tokens=None, seed=0, prompt_logprobs=0)
    with WorkerGroup(folder) as group:
        driver = make_driver(group)
        sequence = driver.admit(random_prompt(20, seed=6), asking)
        before = generate(group, driver, [sequence], tokens=5, budget=64)
        driver.release(sequence)
        resumed = driver.admit(sequence.prompt, asking, output=sequence.output)
        resumed.given = len(resumed.tokens)

        after = generate(group, driver, [resumed], tokens=10, budget=9)

    assert_greedy(model, resumed)
    assert logprobs_by_position(before).keys() == logprobs_by_position(after).keys()


def test_dynamic_scaling_beyond_the_trained_context_follows_incremental_decoding(
    tmp_path: Path,
) -> None:
    model, folder = save_model("llama_dynamic", tmp_path)
    prompt = random_prompt(250, seed=7)
    with WorkerGroup(folder, max_model_len=300, max_num_batched_tokens=300) as group:
        driver = make_driver(group)
        sequence = driver.admit(prompt, room=40)
        generate(group, driver, [sequence], tokens=20, budget=300)

    cache, text = DynamicCache(), torch.tensor([prompt])
    for token in sequence.output:
        with torch.inference_mode():
            logits = model(text, cache=cache, use_cache=True).logits[0, -1]
        assert float(logits.max() - logits[token]) < TOLERANCE
        text = torch.tensor([[token]])


def test_long_factors_are_not_used_where_no_sequence_can_be_long(tmp_path: Path) -> None:
    model, folder = save_model("llama_longrope", tmp_path)
    with WorkerGroup(folder, max_model_len=32) as group:
        driver = make_driver(group)
        sequence = driver.admit(random_prompt(20, seed=15), room=12)
        generate(group, driver, [sequence], tokens=8, budget=64)

    logits = oracle_logits(model, sequence.tokens, is_extended=False)[19:-1]
    chosen = logits.gather(1, torch.tensor(sequence.output)[:, None])[:, 0]
    assert (logits.max(dim=-1).values - chosen).max() < TOLERANCE


def test_a_longer_context_than_the_models_is_refused_before_loading(tmp_path: Path) -> None:
    _, folder = save_model("llama", tmp_path)

    with pytest.raises(ModelError, match="max_model_len=257 is above the 256 tokens"):
        WorkerGroup(folder, max_model_len=257)


def test_seeded_sampling_is_the_same_alone_and_in_company(tmp_path: Path) -> None:
    _, folder = save_model("llama", tmp_path)
    chance = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=None, seed=11)
    outputs = []
    for company in (0, 3):
        with WorkerGroup(folder) as group:
            driver = make_driver(group)
            sequence = driver.admit(random_prompt(12, seed=8), chance)
            others = [driver.admit(random_prompt(9, seed=20 + i)) for i in range(company)]
            generate(group, driver, [sequence, *others], tokens=12, budget=64)
            outputs.append(sequence.output)

    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_types_stay_near_float32(dtype: str, tmp_path: Path) -> None:
    model, folder = save_model("llama", tmp_path)
    asking = SamplingParams(temperature=0.0, max_tokens=None, seed=0, prompt_logprobs=0)
    found = {}
    for ops in ("cpu", "reference"):
        with WorkerGroup(folder, dtype=dtype, ops=ops) as group:
            driver = make_driver(group)
            sequence = driver.admit(random_prompt(40, seed=10), asking)
            found[ops] = logprobs_by_position([run_step(group, driver, [(sequence, 40)])])

    expected = oracle_logits(model, sequence.prompt).log_softmax(dim=-1)
    for by_position in found.values():
        errors = [
            abs(value - float(expected[position - 1, token]))
            for position, by_token in by_position.items()
            for token, value in by_token.items()
        ]
        # bfloat16 keeps 8 bits: 0.4% of logits of magnitude 10, through three layers.
        assert np.mean(errors) < 0.15


def test_a_step_that_samples_nothing_still_answers(tmp_path: Path) -> None:
    _, folder = save_model("llama", tmp_path)
    with WorkerGroup(folder) as group:
        driver = make_driver(group)
        sequence = driver.admit(random_prompt(20, seed=12))

        chunk = run_step(group, driver, [(sequence, 8)])
        driver.release(sequence)
        empty = run_step(group, driver, [])

    assert len(chunk.token) == len(empty.token) == 0
    assert chunk.logprobs is None
    assert chunk.compute_s > 0


@pytest.mark.parametrize("tp", [1, 2])
def test_a_sequence_that_cannot_go_on_is_named_by_its_slice(tp: int, tmp_path: Path) -> None:
    """Its grammar needs a tokenizer, and this model has none; the others are answered."""
    _, folder = save_model("llama_tied", tmp_path)
    guided = SamplingParams(temperature=0.0, grammar="start: /a/", logprobs=1)
    with WorkerGroup(folder, tp=tp) as group:
        driver = make_driver(group)
        in_chunks = driver.admit(random_prompt(20, seed=1))
        failing = driver.admit(random_prompt(5, seed=2), guided)
        free = driver.admit(random_prompt(5, seed=3))

        result = run_step(group, driver, [(in_chunks, 7), (failing, 5), (free, 5)])
        after = run_step(group, driver, [(in_chunks, 13), (free, 1)])

    ((row, message),) = ((failed.row, failed.message) for failed in result.failed)
    assert row == 1
    assert "needs tokenizer.json" in message
    assert result.logprobs is None
    assert len(result.token) == 2
    assert after.failed == ()
    assert len(after.token) == 2


def test_a_plan_out_of_order_is_refused_with_both_numbers(tmp_path: Path) -> None:
    _, folder = save_model("llama", tmp_path)
    with WorkerGroup(folder) as group:
        driver = make_driver(group)
        driver.step = 4

        with pytest.raises(ProtocolError, match="plan of step 5 came after step 0"):
            group.execute(driver.plan([]))


def rows_of(rows: LogprobRows | None) -> LogprobRows:
    assert rows is not None
    return rows


def test_alternatives_are_the_oracles_most_probable_tokens(tmp_path: Path) -> None:
    model, folder = save_model("llama", tmp_path)
    asking = SamplingParams(temperature=0.0, max_tokens=None, seed=0, logprobs=4)
    with WorkerGroup(folder) as group:
        driver = make_driver(group)
        plain = driver.admit(random_prompt(6, seed=13))
        sequence = driver.admit(random_prompt(7, seed=14), asking)
        result = run_step(group, driver, [(plain, 6), (sequence, 7)])

    rows = rows_of(result.logprobs)
    expected = oracle_logits(model, sequence.prompt)[-1].topk(4).indices.tolist()
    assert rows.row.tolist() == [1]
    assert rows.token.tolist() == [expected[0], *expected]
    assert rows.rank.tolist() == [1]
