"""Running guided cases through a cluster in this process."""

from collections.abc import Iterable, Sequence

import jsonschema

from cluster.frontend.grammar_process import GrammarProcess
from cluster.frontend.tokenizer import Tokenizer
from scheduler.request import Finish
from scheduler.sampling import SamplingParams
from tests.system.guided_cases import GuidedCase
from tests.system.in_process import Answer, InProcessCluster

PROMPT = "Here is a short example of what was asked for:\n"
MAX_TOKENS = 160


def asked_of(
    case: GuidedCase, grammars: GrammarProcess, seed: int, **changes: object
) -> SamplingParams:
    """The case at temperature 1, as the engine gets it from a front end."""
    fields: dict[str, object] = {"temperature": 1.0, "seed": seed, "max_tokens": MAX_TOKENS}
    grammar = grammars.grammar_of(case.wanted)
    return SamplingParams(**(fields | changes), grammar=grammar)  # type: ignore[arg-type]


def run_cases(
    cluster: InProcessCluster,
    tokenizer: Tokenizer,
    cases: Sequence[GuidedCase],
    asked: Iterable[SamplingParams],
) -> list[Answer]:
    prompt = tokenizer.encode(PROMPT)
    answers = [cluster.submit(prompt, one) for one in asked]
    assert len(answers) == len(cases)
    cluster.run()
    return answers


def text_of(answer: Answer, tokenizer: Tokenizer) -> str:
    """The output as a client shows it: without the end token."""
    tokens = answer.tokens[:-1] if answer.finish is Finish.STOP else answer.tokens
    return tokenizer.decode(tokens)


def complaints(
    cases: Sequence[GuidedCase], answers: Sequence[Answer], tokenizer: Tokenizer
) -> list[str]:
    """What is wrong with the answers that ended by `stop`, and those that did not end at all."""
    found = []
    for case, answer in zip(cases, answers, strict=True):
        text = text_of(answer, tokenizer)
        if answer.finish is Finish.LENGTH:
            continue
        if answer.finish is not Finish.STOP:
            found.append(f"{case.name}: {answer.finish.name} {answer.message} after {text!r}")
            continue
        try:
            case.judge(text)
        except (AssertionError, ValueError, SyntaxError, jsonschema.ValidationError) as error:
            found.append(f"{case.name}: {text!r}: {error}".split("\n\n")[0])
    return found
