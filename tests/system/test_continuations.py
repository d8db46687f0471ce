"""Another engine goes on with a request, from any cut, bit for bit: on the real model."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from cluster.frontend.grammar_process import GrammarProcess
from cluster.frontend.tokenizer import Tokenizer
from cluster.frontend.tokenizer_files import files_of
from scheduler.request import Finish
from scheduler.sampling import SamplingParams
from tests.system.guided import asked_of
from tests.system.guided_cases import guided_cases
from tests.system.in_process import END, Answer, InProcessCluster, LoadedRanks
from tests.system.prompts import probes

pytestmark = pytest.mark.model

MAX_TOKENS = 12
BY_NAME = {case.name: case for case in guided_cases()}
GUIDED = ("object/person", "composed/many_emoji", "regex/roman", "lark/arithmetic")


@pytest.fixture(scope="module")
def grammars(smollm2: Path) -> Iterator[GrammarProcess]:
    process = GrammarProcess(files_of(smollm2).tokenizer_json)
    yield process
    process.close()


def everything_asked(grammars: GrammarProcess) -> dict[str, SamplingParams]:
    """By what it is about."""
    plain = SamplingParams(temperature=0.0, seed=0, max_tokens=MAX_TOKENS, logprobs=2)
    drawn = msgspec.structs.replace(plain, temperature=0.9, top_p=0.95, seed=11)
    asked = {
        "greedy": plain,
        "seed": drawn,
        "top_k and min_p": msgspec.structs.replace(drawn, top_k=20, min_p=0.02, seed=12),
        "repetition": msgspec.structs.replace(plain, repetition_penalty=1.4),
        "presence": msgspec.structs.replace(drawn, presence_penalty=1.5, seed=13),
        "frequency": msgspec.structs.replace(drawn, frequency_penalty=1.2, seed=14),
        "min_tokens": msgspec.structs.replace(drawn, min_tokens=9, logit_bias={END: 9.0}, seed=15),
        "bad words": msgspec.structs.replace(plain, bad_word_ids=((28,), (260, 253), (30, 339))),
        "allowed": msgspec.structs.replace(
            drawn, allowed_token_ids=tuple(range(200, 900)), seed=16
        ),
        "stop ids": msgspec.structs.replace(drawn, stop_token_ids=(28, 30, 253, 282), seed=17),
        "end": msgspec.structs.replace(drawn, logit_bias={END: 8.0}, seed=18),
    }
    for seed, name in enumerate(GUIDED):
        guided = asked_of(BY_NAME[name], grammars, seed, max_tokens=MAX_TOKENS)
        asked[name] = msgspec.structs.replace(guided, logprobs=1)
    return asked


def spacious(ranks: LoadedRanks) -> InProcessCluster:
    return InProcessCluster(ranks, num_blocks=1000, max_num_seqs=64, max_num_batched_tokens=96)


def cuts_of(whole: Answer) -> list[int]:
    """After the first token, before the last, and between."""
    length = len(whole.tokens)
    return sorted({1, length // 2, length - 1} - {0, length})


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_from_any_cut_another_engine_says_what_one_would_have_said(
    tp: int,
    loaded: Callable[[int], LoadedRanks],
    tokenizer: Tokenizer,
    grammars: GrammarProcess,
) -> None:
    asked = everything_asked(grammars)
    prompts = [probes(tokenizer)[i % 6][:24] for i in range(len(asked))]
    one = spacious(loaded(tp))
    wholes = [one.submit(*each) for each in zip(prompts, asked.values(), strict=True)]
    one.run()

    other = spacious(loaded(tp))
    rests = [
        (name, cut, whole, other.submit(whole.prompt, sampling, output=whole.tokens[:cut]))
        for (name, sampling), whole in zip(asked.items(), wholes, strict=True)
        for cut in cuts_of(whole)
    ]
    other.run()

    assert {whole.finish for whole in wholes} == {Finish.LENGTH, Finish.STOP}
    assert len(rests) > 32  # more than have logits at a time on a CPU
    for name, cut, whole, rest in rests:
        assert rest.tokens == whole.tokens, f"{name}, cut at {cut}"
        assert rest.finish is whole.finish, f"{name}, cut at {cut}"
        first = len(whole.prompt) + cut
        new = {at: found for at, found in whole.logprobs.items() if at >= first}
        assert rest.logprobs == new, f"{name}, cut at {cut}"
