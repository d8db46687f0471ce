"""How the tools of a request become a request of the engine."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer as RawTokenizer

from cluster.api.openai.item_ids import item_ids
from cluster.api.openai.prompts import Drafting
from cluster.api.openai.tools.formats import HERMES, LLAMA3
from cluster.api.openai.tools.use import (
    Function,
    Mode,
    ParserName,
    ToolChoice,
    ToolUse,
    tool_use_of,
)
from cluster.frontend.draft import Draft, RequestOptions
from cluster.frontend.tokenizer import Tokenizer
from scheduler.errors import InvalidRequest
from scheduler.sampling import SamplingParams
from scheduler.structured import StructuredOutputs
from tests.cluster.api.openai.tools import templates
from tests.cluster.frontend.fake_engine import make_info
from tests.cluster.frontend.tiny_tokenizers import CHATML, llama3_like, make_files

CITY: dict[str, object] = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = Function(name="weather", parameters=CITY)
TIME = Function(name="time")


def use(
    *functions: Function,
    mode: Mode = "auto",
    template: str = CHATML,
    parser: ParserName = "auto",
    names: tuple[str, ...] | None = None,
    is_parallel: bool = True,
) -> ToolUse | None:
    return tool_use_of(
        functions,
        ToolChoice(mode=mode, names=names, is_parallel=is_parallel),
        parser=parser,
        templates={"default": template},
    )


Grammar = Callable[..., str]


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    tokenizer = Tokenizer(llama3_like())
    yield tokenizer
    tokenizer.close()


@pytest.fixture
def grammar(tokenizer: Tokenizer) -> Grammar:
    """The grammar of the request, or nothing."""

    def grammar_of(wanted: ToolUse | None, structure: StructuredOutputs | None = None) -> str:
        sampling = SamplingParams(structured_outputs=structure)
        return draft(wanted, tokenizer, sampling).sampling.grammar or ""

    return grammar_of


def draft(
    wanted: ToolUse | None, tokenizer: Tokenizer, sampling: SamplingParams | None = None
) -> Draft:
    assert wanted is not None
    drafting = Drafting(
        call_id="c",
        info=make_info(tokenizer.files),
        sampling=sampling or SamplingParams(),
        options=RequestOptions(),
        draw_seed=lambda: 1,
    )
    return wanted.draft(drafting, [1, 2, 3], tokenizer)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (templates.HERMES, HERMES),
        (templates.LLAMA3, LLAMA3),
        (CHATML, HERMES),
        ("", HERMES),
    ],
    ids=["hermes", "llama3", "no tools", "no template"],
)
def test_the_format_is_that_of_the_chat_template(template: str, expected: object) -> None:
    found = use(WEATHER, template=template)
    assert found is not None
    assert found.tool_format is expected


def test_the_setting_overrules_the_template() -> None:
    found = use(WEATHER, template=templates.HERMES, parser="llama3")
    assert found is not None
    assert found.tool_format is LLAMA3


def test_the_template_for_tools_counts_where_there_is_one() -> None:
    named = {"default": CHATML, "tool_use": templates.LLAMA3}
    found = tool_use_of([WEATHER], ToolChoice(), parser="auto", templates=named)
    assert found is not None
    assert found.tool_format is LLAMA3


def test_nothing_is_held_to_a_grammar_where_the_model_is_free(grammar: Grammar) -> None:
    assert grammar(use(WEATHER, TIME)) == ""
    assert use(WEATHER, mode="none") is None
    assert use() is None


def test_what_must_be_called_is_in_the_grammar_and_nothing_else(grammar: Grammar) -> None:
    both = grammar(use(WEATHER, TIME, mode="required"))
    assert "weather" in both
    assert "time" in both
    named = grammar(use(WEATHER, TIME, mode="required", names=("time",), is_parallel=False))
    assert "weather" not in named
    assert "time" in named


def test_all_tools_are_shown_also_where_only_some_may_be_called() -> None:
    found = use(WEATHER, TIME, names=("time",))
    assert found is not None
    shown: list[Any] = found.described
    assert [each["function"]["name"] for each in shown] == ["weather", "time"]


def test_strict_functions_hold_calls_in_free_text_to_their_schemas(grammar: Grammar) -> None:
    strict = Function(name="weather", parameters=CITY, is_strict=True)
    text = grammar(use(strict, TIME))
    assert "TEXT" in text
    assert '"city"' in text
    assert grammar(use(strict, template=templates.LLAMA3)) == ""


def test_calls_or_json_where_both_are_wanted(grammar: Grammar) -> None:
    schema: dict[str, object] = {"type": "object", "properties": {"answer": {}}}
    text = grammar(use(WEATHER), StructuredOutputs(json=schema))
    assert '"answer"' in text
    assert "weather" in text
    assert "content" in grammar(use(WEATHER), StructuredOutputs(json_object=True))
    forced = grammar(use(WEATHER, mode="required"), StructuredOutputs(json=schema))
    assert '"answer"' not in forced


def test_other_forms_and_free_calls_exclude_each_other(grammar: Grammar) -> None:
    with pytest.raises(InvalidRequest, match=r"structured_outputs\.regex and tools") as caught:
        grammar(use(WEATHER), StructuredOutputs(regex="a+"))
    assert caught.value.param == "structured_outputs"


def test_a_schema_that_cannot_be_followed_is_named_as_one_of_the_tools(grammar: Grammar) -> None:
    odd = Function(name="odd", parameters={"type": "object", "properties": {"a": {"type": "x"}}})
    with pytest.raises(InvalidRequest, match="calls of these tools") as caught:
        grammar(use(odd, mode="required"))
    assert caught.value.param == "tools"


def test_marks_that_are_special_tokens_stay_in_the_text_and_the_end_token_does_not() -> None:
    raw = RawTokenizer.from_buffer(llama3_like().tokenizer_json)
    raw.add_special_tokens(["<tool_call>", "</tool_call>"])
    files = make_files(raw, bos_token="<|begin|>", eos_token="<|im_end|>")
    made = draft(use(WEATHER), Tokenizer(files))
    text = '<tool_call>{"name": "weather"}</tool_call><|im_end|>'
    ids = raw.encode(text, add_special_tokens=False).ids
    stream = made.text_stream()
    assert stream is not None
    assert stream.feed(ids[:-1]).text == text.removesuffix("<|im_end|>")
    assert not made.last_adds_text(ids[-1])

    plain = draft(use(WEATHER), Tokenizer(llama3_like()))
    assert plain.sampling.skip_special_tokens
    assert not plain.hides_end


def test_each_output_has_a_parser_and_each_call_an_id_of_its_own() -> None:
    found = use(WEATHER)
    assert found is not None
    call = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    ids = {found.parser(item_ids("call", str(i))).feed(call)[0].call_id for i in range(3)}  # type: ignore[union-attr]
    assert len(ids) == 3
