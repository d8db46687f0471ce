"""Guided decoding on the real model: issue 3, statement 3; cases 46, 47 and 52."""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.frontend.grammar_process import GrammarProcess
from cluster.frontend.tokenizer import Tokenizer
from cluster.frontend.tokenizer_files import files_of
from scheduler.request import Finish
from scheduler.sampling import SamplingParams
from scheduler.structured import StructuredOutputs
from stoker import LLM, AsyncClient, Client, RequestOutput
from tests.system.guided import asked_of, complaints, run_cases, text_of
from tests.system.guided_cases import GuidedCase, guided_cases
from tests.system.in_process import END, Answer, InProcessCluster, LoadedRanks

pytestmark = pytest.mark.model

CASES = guided_cases()
BY_NAME = {case.name: case for case in CASES}
FEW = (
    "object/person", "object/names_with_letters", "object/names_with_signs", "composed/many_emoji",
    "composed/keyed_cjk", "enum/family", "enum/quotes_and_slashes", "number/integer_17_4242",
    "number/sevens", "array/tuple", "array/unions", "union/one_of_apart", "union/all_of_objects",
    "reference/tree", "format/date", "string/phone", "string/unanchored", "json/own_whitespace",
    "regex/roman", "regex/groups", "choice/signs", "lark/arithmetic", "lark/json_in_words",
    "gbnf/greeting",
)  # fmt: skip
SEVERAL = tuple(
    BY_NAME[name] for name in ("object/person", "composed/many_emoji", "composed/keyed_cjk")
)


@pytest.fixture(scope="module")
def grammars(smollm2: Path) -> Iterator[GrammarProcess]:
    process = GrammarProcess(files_of(smollm2).tokenizer_json)
    yield process
    process.close()


@pytest.fixture
def ranks(loaded: Callable[[int], LoadedRanks]) -> LoadedRanks:
    return loaded(1)


def spacious(ranks: LoadedRanks, **settings: int) -> InProcessCluster:
    return InProcessCluster(ranks, num_blocks=1000, max_num_seqs=32, **settings)


def outside_strings(text: str) -> str:
    return re.sub(r'"(\\.|[^"\\])*("|$)', '""', text)


# --- every form holds -----------------------------------------------------------------------


def test_what_ends_by_stop_has_the_form_that_was_asked_for(
    ranks: LoadedRanks, tokenizer: Tokenizer, grammars: GrammarProcess
) -> None:
    cases = [BY_NAME[name] for name in FEW]
    asked = [asked_of(case, grammars, seed, max_tokens=32) for seed, case in enumerate(cases)]

    answers = run_cases(spacious(ranks), tokenizer, cases, asked)

    assert complaints(cases, answers, tokenizer) == []
    assert sum(answer.finish is Finish.STOP for answer in answers) >= len(cases) * 2 // 3


@pytest.mark.slow
def test_two_hundred_forms_hold(
    ranks: LoadedRanks, tokenizer: Tokenizer, grammars: GrammarProcess
) -> None:
    assert len(CASES) >= 200
    asked = [asked_of(case, grammars, i) for i, case in enumerate(CASES)]

    answers = run_cases(spacious(ranks), tokenizer, CASES, asked)

    assert complaints(CASES, answers, tokenizer) == []
    assert sum(answer.finish is Finish.STOP for answer in answers) >= 180


def test_json_does_not_loop_on_whitespace(
    ranks: LoadedRanks, tokenizer: Tokenizer, grammars: GrammarProcess
) -> None:
    """Case 47: a document parses, or is cut at max_tokens and says so."""
    schemas: list[object] = [
        True,
        {"type": "object"},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "object", "additionalProperties": {"type": "array"}},
        {"type": "object", "properties": {"a": {"type": "object"}}, "required": ["a"]},
    ]
    wanted = [StructuredOutputs(json=schema) for schema in schemas]  # type: ignore[arg-type]
    cases = [GuidedCase(f"free/{i}", one, json.loads) for i, one in enumerate(wanted)]
    # Whitespace is what such a model would like best here.
    blank = {tokenizer.encode(text)[0]: 8.0 for text in (" ", "\n", "  ", "\n\n", "    ")}
    asked = [
        asked_of(case, grammars, seed, max_tokens=24, logit_bias=blank)
        for seed, case in enumerate(cases)
    ]

    answers = run_cases(spacious(ranks), tokenizer, cases, asked)

    assert complaints(cases, answers, tokenizer) == []
    for answer in answers:
        assert answer.finish in (Finish.STOP, Finish.LENGTH)
        assert not re.search(r"\s{4}", outside_strings(text_of(answer, tokenizer)))


def test_letters_of_all_scripts_come_out_as_they_are(
    ranks: LoadedRanks, tokenizer: Tokenizer, grammars: GrammarProcess
) -> None:
    """Case 52, and the way to force a text: an enum of one value."""
    texts = ["👩‍👩‍👧‍👦", "🇯🇵🇺🇦", "e\u0301", "東京都渋谷区", "👍🏽 ok", "שלום"]
    wanted = [StructuredOutputs(json={"enum": [text]}) for text in texts]
    cases = [GuidedCase(text, one, json.loads) for text, one in zip(texts, wanted, strict=True)]
    asked = [asked_of(case, grammars, seed) for seed, case in enumerate(cases)]

    answers = run_cases(spacious(ranks), tokenizer, cases, asked)

    found = [text_of(answer, tokenizer) for answer in answers]
    assert [json.loads(text) for text in found] == texts
    assert not any("\\u" in text for text in found)


# --- and what happens on the way changes nothing --------------------------------------------


def answers_of(
    cluster: InProcessCluster, tokenizer: Tokenizer, grammars: GrammarProcess
) -> list[Answer]:
    asked = [asked_of(case, grammars, i, max_tokens=22) for i, case in enumerate(SEVERAL)]
    return run_cases(cluster, tokenizer, SEVERAL, asked)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_preemption_and_plans_in_flight_change_no_token(
    tp: int, loaded: Callable[[int], LoadedRanks], tokenizer: Tokenizer, grammars: GrammarProcess
) -> None:
    """Case 46: a matcher is made again from the tokens, wherever its sequence goes on."""
    ranks = loaded(tp)
    expected = answers_of(spacious(ranks), tokenizer, grammars)
    one_plan = answers_of(spacious(ranks, plans_in_flight=1), tokenizer, grammars)
    tight = InProcessCluster(ranks, num_blocks=5, block_size=8, max_num_seqs=8, watermark=0.0)
    preempted = answers_of(tight, tokenizer, grammars)

    assert tight.scheduler.counters.preemptions > 0
    assert any(answer.num_preemptions for answer in preempted)
    assert complaints(SEVERAL, expected, tokenizer) == []
    for other in (one_plan, preempted):
        assert [answer.tokens for answer in other] == [answer.tokens for answer in expected]
        assert [answer.finish for answer in other] == [answer.finish for answer in expected]


@pytest.mark.slow
def test_guided_company_changes_nothing_for_a_free_request(
    ranks: LoadedRanks, tokenizer: Tokenizer, grammars: GrammarProcess
) -> None:
    free = SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
    prompt = tokenizer.encode("The sea is")
    alone = spacious(ranks)
    expected = alone.submit(prompt, free)
    alone.run()

    cluster = spacious(ranks)
    found = cluster.submit(prompt, free)
    asked = [asked_of(case, grammars, 0, max_tokens=9) for case in SEVERAL[:2]]
    run_cases(cluster, tokenizer, SEVERAL[:2], asked)

    assert found.tokens == expected.tokens


def test_a_request_that_its_grammar_leaves_nothing_ends_with_an_error_alone(
    ranks: LoadedRanks, tokenizer: Tokenizer, grammars: GrammarProcess
) -> None:
    """Case 46: neither a hang nor a lost request, and the rank goes on."""
    (nine,) = tokenizer.encode("9")
    wanted = StructuredOutputs(regex="[0-8][0-9]{3}")
    case = GuidedCase("digits", wanted, lambda text: None)
    cluster = spacious(ranks)
    prompt = tokenizer.encode("A number:")
    stuck = cluster.submit(prompt, asked_of(case, grammars, 0, allowed_token_ids=[nine]))
    good = cluster.submit(prompt, asked_of(case, grammars, 0))
    cluster.run()

    assert stuck.finish is Finish.ERROR
    assert "allowed_token_ids" in stuck.message
    assert stuck.tokens == []
    assert good.finish is Finish.STOP
    assert re.fullmatch("[0-8][0-9]{3}", text_of(good, tokenizer))
    assert good.tokens[-1] == END


def test_whoever_takes_over_a_slot_follows_its_own_grammar(
    ranks: LoadedRanks, tokenizer: Tokenizer, grammars: GrammarProcess
) -> None:
    """Case 46: the one before it was aborted in the middle of its document."""
    cluster = InProcessCluster(ranks, num_blocks=50, max_num_seqs=1)
    prompt = tokenizer.encode("A number:")
    digits = GuidedCase("digits", StructuredOutputs(regex="[0-9]{30}"), lambda text: None)
    letters = GuidedCase("letters", StructuredOutputs(regex="[a-z]{5}"), lambda text: None)
    first = cluster.submit(prompt, asked_of(digits, grammars, 0))
    second = cluster.submit(prompt, asked_of(letters, grammars, 0))
    while len(first.tokens) < 3:
        cluster.step()

    cluster.abort(first)
    cluster.run()

    assert text_of(first, tokenizer).isdigit()
    assert re.fullmatch("[a-z]{5}", text_of(second, tokenizer))


# --- through the front doors ----------------------------------------------------------------


def test_a_model_in_the_program_keeps_to_a_form(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "東京"]}, "n": {"type": "integer", "maximum": 9}},
        "required": ["city", "n"],
        "additionalProperties": False,
    }
    prompts = ["Where?", "Yes or no?", "When?"]
    forms = [
        StructuredOutputs(json=schema),
        StructuredOutputs(choice=["yes", "no"]),
        StructuredOutputs(regex="[0-9]{4}-[0-9]{2}-[0-9]{2}"),
    ]
    asked = [
        SamplingParams(structured_outputs=form, seed=1, max_tokens=60, logprobs=1) for form in forms
    ]

    where, which, when = [
        output.outputs[0] for output in llm.generate(prompts, asked, use_tqdm=False)
    ]

    assert sorted(json.loads(where.text)) == ["city", "n"]
    assert which.text in ("yes", "no")
    assert re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2}", when.text)
    assert (where.finish_reason, which.finish_reason, when.finish_reason) == ("stop",) * 3


def test_an_asynchronous_client_keeps_to_a_form(llm: LLM) -> None:
    sampling = SamplingParams(structured_outputs=StructuredOutputs(choice=["👍", "👎"]), seed=2)

    async def ask() -> list[RequestOutput]:
        async with AsyncClient(llm.address) as client:
            return await client.generate(["Good?", "Bad?"], sampling)

    outputs = [output.outputs[0] for output in asyncio.run(ask())]

    assert {output.text for output in outputs} <= {"👍", "👎"}
    assert [output.finish_reason for output in outputs] == ["stop", "stop"]


def test_a_stop_text_may_cut_a_document(client: Client) -> None:
    """Case 46: what ends it is the caller's own wish, and says so."""
    sampling = SamplingParams(
        structured_outputs=StructuredOutputs(choice=["one two three four"]), stop=["three"], seed=1
    )

    output = client.submit("Count:", sampling).result(60.0).outputs[0]

    assert output.text == "one two "
    assert (output.finish_reason, output.stop_reason) == ("stop", "three")


def test_an_error_reaches_the_client_with_its_reason(client: Client) -> None:
    sampling = SamplingParams(
        structured_outputs=StructuredOutputs(choice=["yes", "no"]), allowed_token_ids=[500], seed=1
    )

    output = client.submit("Yes or no?", sampling).result().outputs[0]

    assert output.finish_reason == "error"
    assert "leave no token that the grammar allows" in (output.message or "")
