"""Sampling, from what people reported: cases 20 to 35 (group B) on the real model."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from cluster.frontend.tokenizer import Tokenizer
from stoker import LLM, Client, RequestOutput, SamplingParams
from tests.system.in_process import InProcessCluster, LoadedRanks
from tests.system.oracle import TIE, Oracle
from tests.system.prompts import OPENINGS, QUESTIONS, passage
from tests.system.served import as_answer, greedy, settled, text_of, tokens_of

pytestmark = pytest.mark.model

END = 2
PARIS = "Paris Paris Paris"
COUNTING = "1, 2, 3, 4, 5, 6,"


def ask(client: Client | LLM, prompts: list[str], *asked: SamplingParams) -> list[RequestOutput]:
    return client.generate(prompts, list(asked) * (len(prompts) // len(asked)))


def test_case_20_prompt_logprobs_are_the_same_in_one_chunk_and_in_many(
    loaded: Callable[[int], LoadedRanks], tokenizer: Tokenizer
) -> None:
    shared = passage(tokenizer, 40)
    prompts = [[*shared, 100, 200], [*shared, 300, 400, 500]]
    found = []
    for budget in (16, 512):
        cluster = InProcessCluster(
            loaded(2), num_blocks=16, max_num_seqs=4, max_num_batched_tokens=budget
        )
        asked = SamplingParams(temperature=0.0, seed=0, max_tokens=1, prompt_logprobs=0)
        answers = [cluster.submit(prompt, asked) for prompt in prompts]
        cluster.run()
        for answer, prompt in zip(answers, prompts, strict=True):
            assert sorted(answer.logprobs) == list(range(1, len(prompt)))
            found.append([answer.logprobs[at][prompt[at]] for at in sorted(answer.logprobs)])

    assert np.allclose(found[0], found[2], atol=TIE, rtol=0)
    assert np.allclose(found[1], found[3], atol=TIE, rtol=0)
    assert np.allclose(found[0][: len(shared) - 1], found[1][: len(shared) - 1], atol=TIE, rtol=0)


def test_case_22_a_repetition_penalty_counts_prompt_and_output_as_transformers_does(
    client: Client, oracle: Oracle
) -> None:
    asked = greedy(30, repetition_penalty=1.3, ignore_eos=True)
    (output,) = client.generate(PARIS, asked)

    answer = as_answer(output, asked)
    said, penalty = oracle.said(answer), RepetitionPenaltyLogitsProcessor(1.3)
    for at, token in enumerate(answer.tokens):
        before = torch.tensor([answer.prompt + answer.tokens[:at]])
        scores = penalty(before, said.at(len(answer.prompt) + at)[None].clone())[0]
        assert float(scores.max() - scores[token]) < TIE


def test_case_22_presence_and_frequency_penalties_count_the_output_only(client: Client) -> None:
    plain, present, frequent = ask(
        client,
        [PARIS] * 3,
        greedy(1),
        greedy(1, presence_penalty=2.0),
        greedy(1, frequency_penalty=2.0),
    )
    assert tokens_of(plain) == tokens_of(present) == tokens_of(frequent)


def test_case_23_penalties_touch_only_the_requests_that_asked(client: Client) -> None:
    alone = ask(client, list(OPENINGS[:2]), greedy(8))
    penalized = greedy(8, repetition_penalty=1.5, presence_penalty=1.0)
    mixed = client.generate(
        [OPENINGS[0], OPENINGS[0], OPENINGS[1], OPENINGS[1]],
        [greedy(8), penalized, greedy(8), penalized],
    )
    assert [tokens_of(mixed[0]), tokens_of(mixed[2])] == [tokens_of(one) for one in alone]
    assert tokens_of(mixed[1]) != tokens_of(mixed[0])


def test_case_24_no_output_ends_before_min_tokens(llm: LLM) -> None:
    question = [{"role": "user", "content": QUESTIONS[0]}]
    short, long = llm.chat([question] * 2, [greedy(24), greedy(24, min_tokens=20)], use_tqdm=False)

    assert len(tokens_of(short)) == 8
    assert len(tokens_of(long)) >= 20
    assert END not in tokens_of(long)[:19]


def test_case_26_ignore_eos_ignores_the_models_end_and_obeys_the_callers(llm: LLM) -> None:
    question = [{"role": "user", "content": QUESTIONS[0]}]
    (on,) = llm.chat(question, greedy(16, ignore_eos=True), use_tqdm=False)
    own = tokens_of(on)[12]
    first = tokens_of(on).index(own)
    (stopped,) = llm.chat(
        question, greedy(16, ignore_eos=True, stop_token_ids=[own]), use_tqdm=False
    )

    assert len(tokens_of(on)) == 16
    assert on.outputs[0].finish_reason == "length"
    assert END in tokens_of(on)
    assert tokens_of(stopped) == tokens_of(on)[: first + 1]
    assert stopped.outputs[0].stop_reason == own


def test_case_27_a_seeded_request_is_its_own_whoever_is_beside_it(client: Client) -> None:
    asked = SamplingParams(temperature=0.8, seed=42, max_tokens=8)
    (alone,) = client.generate(OPENINGS[1], asked)
    for size in (1, 7):
        company = [
            client.submit(prompt, SamplingParams(temperature=1.0, max_tokens=8))
            for prompt in OPENINGS[:size]
        ]
        (again,) = client.generate(OPENINGS[1], asked)
        for handle in company:
            handle.cancel()
        assert tokens_of(again) == tokens_of(alone)


def test_case_29_a_tiny_temperature_is_greedy(client: Client) -> None:
    temperatures = (0.0, 1e-3, 1e-5, 1e-12)
    outputs = ask(
        client,
        [OPENINGS[0]] * 4,
        *(SamplingParams(temperature=t, max_tokens=10, seed=3) for t in temperatures),
    )
    assert len({tuple(tokens_of(output)) for output in outputs}) == 1
    assert len(tokens_of(outputs[0])) == 10


def test_case_31_sixteen_equal_requests_at_once_say_what_one_alone_says(client: Client) -> None:
    (alone,) = client.generate(OPENINGS[4], greedy(12, logprobs=0))
    together = client.generate([OPENINGS[4]] * 16, greedy(12, logprobs=0))

    assert {tuple(tokens_of(output)) for output in together} == {tuple(tokens_of(alone))}


@pytest.mark.slow
def test_case_34_without_max_tokens_the_context_is_filled(client: Client) -> None:
    prompt = list(range(1000, 1000 + 1010))
    asked = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    (output,) = client.generate({"prompt_token_ids": prompt}, asked)

    assert len(tokens_of(output)) == 1024 - len(prompt)
    assert output.outputs[0].finish_reason == "length"


def test_case_35_nobody_gets_anothers_tokens(client: Client) -> None:
    rng = np.random.default_rng(35)
    markers = (1000 + rng.permutation(64)).tolist()
    handles = [
        client.submit(
            {"prompt_token_ids": rng.integers(100, 40_000, 1 + at % 7).tolist()},
            greedy(1 + at % 6, allowed_token_ids=[marker]),
        )
        for at, marker in enumerate(markers)
    ]
    for at in rng.choice(64, 16, replace=False).tolist():
        handles[at].cancel()

    for at, (handle, marker) in enumerate(zip(handles, markers, strict=True)):
        output = handle.result()
        reason = output.outputs[0].finish_reason
        assert set(tokens_of(output)) <= {marker}
        assert reason == "abort" or tokens_of(output) == [marker] * (1 + at % 6)
    settled(client)


def test_two_equal_questions_at_different_times_have_one_answer(llm: LLM) -> None:
    """Case 36: the second one reads the prefix cache."""
    question = [{"role": "user", "content": "Write one sentence about the colour of the sea."}]
    outputs = [llm.chat(question, greedy(8), use_tqdm=False)[0] for _ in range(3)]

    assert len({text_of(output) for output in outputs}) == 1
    length = len(outputs[0].prompt_token_ids)
    assert [output.num_cached_tokens for output in outputs[1:]] == [(length - 1) // 16 * 16] * 2
