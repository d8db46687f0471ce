"""The public API on the real model, through all processes."""

import asyncio

import pytest

from cluster.frontend.tokenizer import Tokenizer
from stoker import LLM, AsyncClient, Client, RequestOutput, SamplingParams
from tests.system.oracle import Oracle
from tests.system.prompts import OPENINGS, QUESTIONS, passage, probes
from tests.system.served import as_answer, greedy, settled, text_of, tokens_of

pytestmark = pytest.mark.model


def ids(prompts: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def test_it_answers_as_transformers_does_greedily_and_by_chance(
    llm: LLM, tokenizer: Tokenizer, oracle: Oracle
) -> None:
    prompts = probes(tokenizer) * 2
    asked = [greedy(8, logprobs=2, ignore_eos=True)] * (len(prompts) // 2)
    asked += [
        SamplingParams(
            temperature=0.8, top_p=0.95, seed=seed, max_tokens=8, logprobs=0, ignore_eos=True
        )
        for seed in range(len(prompts) // 2)
    ]

    outputs = llm.generate(ids(prompts), asked, use_tqdm=False)

    assert [output.prompt_token_ids for output in outputs] == prompts
    answers = [as_answer(output, one) for output, one in zip(outputs, asked, strict=True)]
    oracle.prepare(answers)
    for answer in answers:
        assert len(answer.tokens) == len(answer.logprobs) == 8
        oracle.check(answer)
        oracle.check_logprobs(answer)


def test_it_scores_a_prompt_as_transformers_does(
    llm: LLM, tokenizer: Tokenizer, oracle: Oracle
) -> None:
    """Also in chunks: the prompt is longer than a step."""
    prompt, asked = passage(tokenizer, 150), greedy(1, prompt_logprobs=3, logprobs=3)

    (output,) = llm.generate(ids([prompt]), asked, use_tqdm=False)

    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    oracle.check_logprobs(as_answer(output, asked))


def test_it_knows_the_capital_of_france(llm: LLM) -> None:
    (output,) = llm.chat(
        [{"role": "user", "content": "What is the capital of France?"}], greedy(20), use_tqdm=False
    )

    assert text_of(output) == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"
    assert len(output.prompt_token_ids) == 37
    assert output.finished


def test_a_stream_is_the_answer_in_pieces(client: Client, tokenizer: Tokenizer) -> None:
    whole = client.generate(list(OPENINGS), greedy(12))
    handles = [client.submit(prompt, greedy(12)) for prompt in OPENINGS]

    for handle, output in zip(handles, whole, strict=True):
        pieces = list(handle)
        assert "".join(piece.text for piece in pieces) == text_of(output)
        assert [t for piece in pieces for t in piece.token_ids] == tokens_of(output)
        assert text_of(output) == tokenizer.decode(tokens_of(output))
        assert all("\ufffd" not in piece.text for piece in pieces[:-1])
        assert pieces[-1].finish_reason == output.outputs[0].finish_reason


@pytest.mark.slow
def test_many_requests_of_an_async_client_run_at_once(llm: LLM) -> None:
    prompts = [*OPENINGS, *QUESTIONS]
    expected = llm.generate(prompts, greedy(12), use_tqdm=False)

    async def ask() -> list[RequestOutput]:
        async with AsyncClient(llm.address) as client:
            handles = [await client.submit(prompt, greedy(12)) for prompt in prompts]
            return list(await asyncio.gather(*(handle.result() for handle in handles)))

    before = llm.client.status().totals.num_steps
    outputs = asyncio.run(ask())
    steps = settled(llm.client).totals.num_steps - before

    assert [tokens_of(output) for output in outputs] == [tokens_of(output) for output in expected]
    assert steps < 12 * len(prompts) / 2, "they did not share steps"


def test_n_outputs_are_those_of_n_seeds(llm: LLM) -> None:
    def ask(n: int, seed: int) -> list[list[int]]:
        asked = SamplingParams(n=n, seed=seed, temperature=1.0, max_tokens=8)
        (output,) = llm.generate("Once upon a time", asked, use_tqdm=False)
        return [one.token_ids for one in output.outputs]

    three = ask(3, seed=5)

    assert three == [ask(1, seed=seed)[0] for seed in (5, 6, 7)]
    assert len({tuple(tokens) for tokens in three}) == 3
