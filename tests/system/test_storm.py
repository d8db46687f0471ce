"""Everything at once, from several clients, and every token that came is judged."""

from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np
import pytest

from cluster.frontend.tokenizer import Tokenizer
from stoker import LLM, Client, RequestOutput, SamplingParams
from tests.system.oracle import Oracle
from tests.system.prompts import OPENINGS, QUESTIONS, chat, passage
from tests.system.served import as_answer, greedy, settled

pytestmark = [pytest.mark.model, pytest.mark.slow]

NUM_CLIENTS, NUM_EACH, AT_ONCE = 4, 30, 10


class Caller:
    """One client with its own will: streams, waits, gives up early or runs out of time."""

    def __init__(self, address: str, prompts: list[list[int]], seed: int) -> None:
        self._address, self._prompts = address, prompts
        self._rng = np.random.default_rng(seed)
        self.outputs: list[tuple[RequestOutput, SamplingParams]] = []

    def run(self) -> None:
        with Client(self._address) as client:
            for _ in range(NUM_EACH // AT_ONCE):
                self._burst(client)

    def _burst(self, client: Client) -> None:
        live = []
        for _ in range(AT_ONCE):
            asked = self._sampling()
            prompt = self._prompts[int(self._rng.integers(len(self._prompts)))]
            timeout_s = 1.0 if self._rng.random() < 0.1 else None
            handle = client.submit({"prompt_token_ids": prompt}, asked, timeout_s=timeout_s)
            live.append((handle, asked))
        for handle, asked in live:
            if self._rng.random() < 0.3:
                list(islice(handle, int(self._rng.integers(0, 4))))
                handle.cancel()
            self.outputs.append((handle.result(120.0), asked))

    def _sampling(self) -> SamplingParams:
        most = int(self._rng.integers(1, 16))
        if self._rng.random() < 0.5:
            return greedy(most, logprobs=1)
        seed = int(self._rng.integers(2**40))
        return SamplingParams(
            temperature=0.8, top_p=0.95, seed=seed, max_tokens=most, logprobs=0, ignore_eos=True
        )


def test_in_a_storm_of_requests_every_token_is_the_references(
    llm: LLM, tokenizer: Tokenizer, oracle: Oracle
) -> None:
    prompts = [tokenizer.encode(text) for text in OPENINGS]
    prompts += [chat(tokenizer, question) for question in QUESTIONS]
    prompts += [passage(tokenizer, length, start=length) for length in (100, 180, 300)]
    callers = [Caller(llm.address, prompts, seed) for seed in range(NUM_CLIENTS)]

    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        list(threads.map(Caller.run, callers))
    settled(llm.client)

    reasons = [output.outputs[0].finish_reason for c in callers for output, _ in c.outputs]
    assert {"length", "abort", "timeout"} <= set(reasons)
    answers = [as_answer(output, asked) for c in callers for output, asked in c.outputs]
    assert len(answers) == NUM_CLIENTS * NUM_EACH
    answers = [answer for answer in answers if answer.tokens]
    oracle.prepare(answers)
    for answer in answers:
        oracle.check(answer)
        oracle.check_logprobs(answer)
