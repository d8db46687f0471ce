"""Tool calls in an answer, cut in every way that a stream may cut it."""

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.api.openai.tools.formats import HERMES, LLAMA3, ToolFormat
from cluster.api.openai.tools.parser import (
    ArgumentsText,
    CallBegins,
    ContentText,
    ToolEvent,
    ToolParser,
)

NAMES = ("weather", "say", "now")


@dataclass
class Answer:
    """Events put together again, as a client does it."""

    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Name and arguments of each call."""
    ids: list[str] = field(default_factory=list)

    def take(self, events: Iterable[ToolEvent]) -> None:
        for event in events:
            match event:
                case ContentText(text):
                    assert text, "an empty piece of content"
                    self.content += text
                case CallBegins(index, call_id, name):
                    assert index == len(self.calls)
                    self.calls.append((name, ""))
                    self.ids.append(call_id)
                case ArgumentsText(index, text):
                    assert text, "an empty piece of arguments"
                    name, before = self.calls[index]
                    self.calls[index] = (name, before + text)


def make_parser(tool_format: ToolFormat, most_calls: int | None = None) -> ToolParser:
    numbers = itertools.count()
    return ToolParser(
        tool_format, NAMES, new_id=lambda: f"call_{next(numbers)}", most_calls=most_calls
    )


def read(tool_format: ToolFormat, pieces: Iterable[str], most_calls: int | None = None) -> Answer:
    parser, answer = make_parser(tool_format, most_calls), Answer()
    for piece in pieces:
        answer.take(parser.feed(piece))
    answer.take(parser.flush())
    return answer


def cut_at(text: str, places: Iterable[int]) -> Iterator[str]:
    bounds = [0, *places, len(text)]
    return (text[start:end] for start, end in itertools.pairwise(bounds))


HERMES_TEXTS: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
    "plain text": ("Hello <b>you</b>, {x}!  ", "Hello <b>you</b>, {x}!  ", []),
    "one call": (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": [1, {"a": "}"}]}}'
        "\n</tool_call>",
        "",
        [("weather", '{"city": "Köln", "days": [1, {"a": "}"}]}')],
    ),
    "text, then two calls": (
        'Let me see.\n\n<tool_call>{"name":"weather","arguments":{"city":"Rome"}}</tool_call>\n'
        '<tool_call>{"name":"say","arguments":{"text":"a \\"b\\" \\\\ </tool_call> c"}}'
        "</tool_call>",
        "Let me see.",
        [("weather", '{"city":"Rome"}'), ("say", '{"text":"a \\"b\\" \\\\ </tool_call> c"}')],
    ),
    "text behind a call": (
        '<tool_call>{"name":"now","arguments":{}}</tool_call>\n Done. ',
        "Done. ",
        [("now", "{}")],
    ),
    "arguments before the name": (
        '<tool_call>{"arguments": {"city": "Oslo"}, "name": "weather"}</tool_call>',
        "",
        [("weather", '{"city": "Oslo"}')],
    ),
    "arguments as a text, null and none": (
        '<tool_call>{"name":"weather","arguments":"{\\"city\\": \\"Bonn\\"}"}</tool_call>'
        '<tool_call>{"name":"now","arguments":null}</tool_call>'
        '<tool_call>{"id": 7, "name":"now"}</tool_call>',
        "",
        [("weather", '{"city": "Bonn"}'), ("now", "{}"), ("now", "{}")],
    ),
    "a list of calls": (
        '<tool_call>[{"name": "now", "arguments": {}}, {"name": "say", "arguments": {"text": "x"}}]'
        "</tool_call>",
        "",
        [("now", "{}"), ("say", '{"text": "x"}')],
    ),
    "a brace missing at the end": (
        '<tool_call>{"name": "now", "arguments": {"a": 1}</tool_call> ok',
        "ok",
        [("now", '{"a": 1}')],
    ),
    "no closing mark": (
        '<tool_call>{"name": "now", "arguments": {"a": 1}}',
        "",
        [("now", '{"a": 1}')],
    ),
    "cut in the arguments": (
        '<tool_call>{"name": "say", "arguments": {"text": "Hel',
        "",
        [("say", '{"text": "Hel')],
    ),
    "cut in the closing mark": (
        '<tool_call>{"name": "now", "arguments": {}}\n</tool_',
        "",
        [("now", "{}")],
    ),
    "cut before the name is known": (
        'Hm. <tool_call>{"name": "sa',
        'Hm. <tool_call>{"name": "sa',
        [],
    ),
    "no object in the marks": (
        "Use <tool_call> and </tool_call> around it",
        "Use <tool_call> and </tool_call> around it",
        [],
    ),
    "another object in the marks": (
        '<tool_call>{"colour": "red"}</tool_call>',
        '<tool_call>{"colour": "red"}</tool_call>',
        [],
    ),
    "half a character in the name": (
        r'<tool_call>{"name": "\ud83d", "arguments": {}}</tool_call>',
        r'<tool_call>{"name": "\ud83d", "arguments": {}}</tool_call>',
        [],
    ),
    "half a character in arguments as a text": (
        r'<tool_call>{"name": "now", "arguments": "{\"a\": \"\ud83d\"}"}</tool_call>',
        r'<tool_call>{"name": "now", "arguments": "{\"a\": \"\ud83d\"}"}</tool_call>',
        [],
    ),
    "arguments that are a list": (
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        [],
    ),
    "a broken call, then one that is right": (
        '<tool_call>{"name": 5}</tool_call>\n<tool_call>{"name":"now","arguments":{}}</tool_call>',
        '<tool_call>{"name": 5}</tool_call>',
        [("now", "{}")],
    ),
    "a mark in a mark": (
        '<tool_<tool_call><tool_call>{"name":"now","arguments":{}}</tool_call>',
        "<tool_<tool_call>",
        [("now", "{}")],
    ),
    "arguments that break": (
        '<tool_call>{"name":"now","arguments":{"a": \'x\'}}</tool_call>!',
        "'x'}}</tool_call>!",
        [("now", '{"a": ')],
    ),
    "white space alone": (" \n ", " \n ", []),
}

LLAMA3_TEXTS: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
    "plain text": ("Hello {name}, <|x", "Hello {name}, <|x", []),
    "one bare call": (
        '{"name": "weather", "parameters": {"city": "Rome; {"}}',
        "",
        [("weather", '{"city": "Rome; {"}')],
    ),
    "behind the mark": (
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}',
        "",
        [("weather", '{"city": "Rome"}')],
    ),
    "several": (
        'Well: {"name": "now", "parameters": {}}; {"name": "say", "parameters": {"text": ";"}};'
        '<|python_tag|>{"type": "function", "name": "now", "arguments": {}}',
        "Well:",
        [("now", "{}"), ("say", '{"text": ";"}'), ("now", "{}")],
    ),
    "plain JSON": (
        '{"name": "Alice", "parameters": {"age": 5}} and {"a": {"name": "now"}',
        '{"name": "Alice", "parameters": {"age": 5}} and {"a":',
        [("now", "{}")],
    ),
    "a separator, then text": (
        '{"name": "now", "parameters": {}}; that is all',
        "; that is all",
        [("now", "{}")],
    ),
    "a mark without a call": ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    "cut in the arguments": (
        '{"name": "say", "parameters": {"text": "\\',
        "",
        [("say", '{"text": "\\')],
    ),
    "braces": ("{{{}}} {", "{{{}}} {", []),
}

TEXTS = [
    *(pytest.param(HERMES, *case, id=f"hermes: {name}") for name, case in HERMES_TEXTS.items()),
    *(pytest.param(LLAMA3, *case, id=f"llama3: {name}") for name, case in LLAMA3_TEXTS.items()),
]


@pytest.mark.parametrize(("tool_format", "text", "content", "calls"), TEXTS)
def test_an_answer_is_taken_apart_the_same_way_however_it_is_cut(
    tool_format: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    whole = read(tool_format, [text])
    assert (whole.content, whole.calls) == (content, calls)
    assert whole.ids == [f"call_{i}" for i in range(len(calls))]
    assert read(tool_format, text) == whole, "letter by letter"
    for place in range(1, len(text)):
        assert read(tool_format, cut_at(text, [place])) == whole, f"cut at {place}"
        for size in (1, 2, 5):  # a small piece between two large ones
            cuts = place, min(place + size, len(text))
            assert read(tool_format, cut_at(text, cuts)) == whole, f"cut at {cuts}"


@pytest.mark.slow
@pytest.mark.parametrize(("tool_format", "text", "content", "calls"), TEXTS)
def test_an_answer_is_taken_apart_the_same_way_at_every_pair_of_cuts(
    tool_format: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    whole = read(tool_format, [text])
    assert (whole.content, whole.calls) == (content, calls)
    for cuts in itertools.combinations(range(1, len(text)), 2):
        assert read(tool_format, cut_at(text, cuts)) == whole, f"cut at {cuts}"


def test_arguments_come_in_pieces_as_they_are_written() -> None:
    parser = make_parser(HERMES)
    assert parser.feed('<tool_call>{"name": "say", "arguments"') == []
    assert parser.feed(': {"te') == [CallBegins(0, "call_0", "say"), ArgumentsText(0, '{"te')]
    assert parser.feed('xt": "Hi') == [ArgumentsText(0, 'xt": "Hi')]
    assert parser.feed('"}') == [ArgumentsText(0, '"}')]
    assert parser.feed("}</tool_call>") == []
    assert parser.flush() == []


def test_text_is_not_held_back_longer_than_it_may_be_a_mark() -> None:
    parser = make_parser(HERMES)
    assert parser.feed("Hi <tool") == [ContentText("Hi")]
    assert parser.feed("box>") == [ContentText(" <toolbox>")]


def test_no_more_calls_come_out_than_were_asked_for() -> None:
    text, _, calls = HERMES_TEXTS["text, then two calls"]
    answer = read(HERMES, [f"{text} and text"], most_calls=1)
    assert (answer.content, answer.calls) == ("Let me see.", calls[:1])
    assert read(HERMES, f"{text} and text", most_calls=1) == answer


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA3], ids=["hermes", "llama3"])
def test_reading_takes_time_in_proportion_to_the_text(tool_format: ToolFormat) -> None:
    """These would take minutes if what was tried and given up were read again."""
    nested = f'{{"{tool_format.arguments_key}": ' * 5_000
    for text in (nested, tool_format.opening * 10_000, "{" * 20_000, '{"name": "' * 10_000):
        answer = read(tool_format, [text])
        assert (answer.content, answer.calls) == (text, [])


def test_what_comes_out_as_a_complete_call_can_be_read_as_json() -> None:
    text = HERMES_TEXTS["one call"][0]
    ((_, arguments),) = read(HERMES, text).calls
    assert json.loads(arguments) == {"city": "Köln", "days": [1, {"a": "}"}]}


PARTS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "<tool", "<", ";", " ", "\n", "x", "é"),
    *("{", "}", "[", "]", ":", ",", '"', "\\", "null", "1", "'"),
    *('"name"', '"weather"', '"arguments"', '"parameters"', '{"name": "now", "arguments": {'),
    *('<tool_call>{"name": "say", "arguments": {"text": "', '"}}', '{"name": "now", "parameters"'),
]


@settings(max_examples=150, derandomize=True, database=None, deadline=None)
@given(
    tool_format=st.sampled_from([HERMES, LLAMA3]),
    parts=st.lists(st.sampled_from(PARTS), max_size=30),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_whatever_a_model_writes_is_read_the_same_way_however_it_is_cut(
    tool_format: ToolFormat, parts: list[str], cuts: list[int]
) -> None:
    text = "".join(parts)
    whole = read(tool_format, [text])
    assert read(tool_format, text) == whole
    assert read(tool_format, cut_at(text, sorted(min(cut, len(text)) for cut in cuts))) == whole
    said = whole.content + "".join(name + arguments for name, arguments in whole.calls)
    assert len(said) <= len(text) + 2 * len(whole.calls), "nothing is said twice"
    if not whole.calls:
        assert whole.content == text
