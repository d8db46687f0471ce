"""What the load asks: a fixed list of requests of every kind, the same from the same seed."""

import random
from dataclasses import dataclass

from scheduler.sampling import SamplingParams
from scheduler.structured import StructuredOutputs

TOKEN_IDS = (300, 40_000)
"""Of prompts: plain tokens of the vocabulary"""

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer"},
        "parts": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 6},
    },
    "required": ["name", "count", "parts"],
    "additionalProperties": False,
}

KINDS = (
    "greedy",
    "seeded",
    "several",
    "logprobs",
    "prompt_logprobs",
    "penalties",
    "regex",
    "schema",
    "choice",
    "long_prompt",
    "shared_prefix",
    "http_greedy",
    "http_seeded",
    "http_several",
    "http_regex",
)


@dataclass(frozen=True, slots=True)
class Call:
    """One request."""

    number: int
    kind: str
    prompt: list[int]
    sampling: SamplingParams

    @property
    def is_http(self) -> bool:
        return self.kind.startswith("http")


def make_calls(count: int, *, seed: int, max_tokens: int, max_prompt: int) -> list[Call]:
    """`count` requests, of all kinds in turn.

    Args:
        max_tokens: of the longest outputs.
        max_prompt: tokens of the long prompts.
    """
    chance = random.Random(seed)
    prefix = _tokens(chance, 70)
    return [
        _call(number, KINDS[number % len(KINDS)], chance, prefix, max_tokens, max_prompt)
        for number in range(count)
    ]


def _call(
    number: int,
    kind: str,
    chance: random.Random,
    prefix: list[int],
    max_tokens: int,
    max_prompt: int,
) -> Call:
    length = chance.randint(max_prompt // 2, max_prompt) if kind == "long_prompt" else 0
    prompt = _tokens(chance, length or chance.randint(3, 60))
    if kind == "shared_prefix":
        prompt = prefix + prompt
    seed = chance.randrange(2**40)
    most = chance.randint(max_tokens // 8, max_tokens)
    free = SamplingParams(temperature=0.9, top_p=0.95, seed=seed, max_tokens=most, ignore_eos=True)
    greedy = SamplingParams(temperature=0.0, seed=seed, max_tokens=most, ignore_eos=True)

    def guided(structure: StructuredOutputs) -> SamplingParams:
        return SamplingParams(
            temperature=0.9, seed=seed, max_tokens=most, structured_outputs=structure
        )

    regex = guided(StructuredOutputs(regex="([a-z]{2,9} ){8,40}end"))
    sampling = {
        "seeded": free,
        "http_seeded": free,
        "several": SamplingParams(
            n=3, temperature=0.8, top_k=50, seed=seed, max_tokens=most // 2 + 1, ignore_eos=True
        ),
        "http_several": SamplingParams(
            n=2, temperature=0.8, seed=seed, max_tokens=most // 2 + 1, ignore_eos=True
        ),
        "logprobs": SamplingParams(
            temperature=0.7, seed=seed, max_tokens=most, logprobs=3, ignore_eos=True
        ),
        "prompt_logprobs": SamplingParams(
            temperature=0.0, seed=seed, max_tokens=most, logprobs=1, prompt_logprobs=2
        ),
        "penalties": SamplingParams(
            temperature=0.8,
            seed=seed,
            max_tokens=most,
            min_tokens=most // 2,
            repetition_penalty=1.2,
            frequency_penalty=0.5,
            presence_penalty=0.3,
        ),
        "regex": regex,
        "http_regex": regex,
        "schema": guided(StructuredOutputs(json=SCHEMA)),
        "choice": guided(StructuredOutputs(choice=("red", "green and blue"))),
    }.get(kind, greedy)
    return Call(number, kind, prompt, sampling)


def _tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randint(*TOKEN_IDS) for _ in range(count)]
