"""What a load asks: synthetic prompts, lengths, files."""

import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from stoker.bench.lengths import LengthMix
from stoker.bench.trace import BadTrace, read_conversations, read_trace
from stoker.bench.workload import Call, MadeUp, Recorded, Synthetic, short_calls
from tests.conftest import ROOT


def synthetic(**fields: object) -> Synthetic:
    values: dict[str, object] = {
        "input_len": LengthMix.parse("20-40"),
        "output_len": LengthMix.parse("5,50"),
    }
    return Synthetic(**(values | fields))  # type: ignore[arg-type]


def some(calls: Iterator[Call], count: int = 30) -> list[Call]:
    return list(islice(calls, count))


def lengths(calls: list[Call]) -> list[tuple[int, int | None]]:
    return [(len(call.prompt), call.max_tokens) for call in calls]


# --- lengths ---


@pytest.mark.parametrize(
    ("text", "possible"), [("7", {7}), ("3-5", {3, 4, 5}), ("2, 10-11", {2, 10, 11})]
)
def test_lengths_are_drawn_from_the_ranges_named(text: str, possible: set[int]) -> None:
    mix, chance = LengthMix.parse(text), random.Random(0)

    assert {mix.draw(chance) for _ in range(200)} == possible
    assert LengthMix.parse(str(mix)) == mix


@pytest.mark.parametrize("text", ["", "x", "0", "5-3", "-4", "1,,2", "1.5"])
def test_lengths_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="length"):
        LengthMix.parse(text)


# --- synthetic prompts ---


def test_two_runs_of_one_seed_ask_the_same_work_with_prompts_that_no_cache_knows() -> None:
    first, second = (some(synthetic().calls(0, run)) for run in ("a", "b"))

    assert lengths(first) == lengths(second)
    assert len({tuple(call.prompt[:4]) for call in first + second}) == 60


def test_another_seed_asks_other_work() -> None:
    assert lengths(some(synthetic().calls(0, "a"))) != lengths(some(synthetic().calls(1, "a")))


def test_prompts_repeat_only_when_that_is_asked_for() -> None:
    repeating = synthetic(repeats=True)

    assert some(repeating.calls(0, "a")) == some(repeating.calls(0, "b"))
    assert some(synthetic().calls(0, "a")) == some(synthetic().calls(0, "a"))


def test_requests_share_the_prefixes_they_are_asked_to_and_no_more() -> None:
    calls = some(synthetic(prefix_len=16, num_prefixes=3).calls(0, "a"))

    assert len({tuple(call.prompt[:16]) for call in calls}) == 3
    assert len({tuple(call.prompt[:18]) for call in calls}) == 30
    assert all(16 + 20 <= len(call.prompt) <= 16 + 40 for call in calls)


def test_token_ids_stay_in_their_range() -> None:
    calls = some(synthetic(made_of=MadeUp(token_ids=(5, 9))).calls(0, "a"))

    assert {token for call in calls for token in call.prompt} == {5, 6, 7, 8, 9}


def test_text_is_as_many_words_as_tokens_were_asked_for() -> None:
    workload = synthetic(input_len=LengthMix.parse("12"), made_of=MadeUp(is_text=True))

    (call,) = some(workload.calls(0, "a"), 1)

    assert isinstance(call.prompt, str)
    assert len(call.prompt.split(" ")) == 12


def test_a_warm_up_knows_no_prompt_of_its_run() -> None:
    made_of = MadeUp()
    warm = short_calls(made_of, 0, "a", 3)

    run = some(synthetic().calls(0, "a"))
    assert len(warm) == 3
    assert not {tuple(c.prompt[:4]) for c in warm} & {tuple(c.prompt[:4]) for c in run}


# --- files ---


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_the_traces_of_the_repository_can_be_read() -> None:
    for path in sorted((ROOT / "bench" / "workloads").glob("*.json")):
        entries = read_trace(path)
        assert all(entry.prompt_token_ids and entry.max_tokens for entry in entries)


def test_a_trace_gives_prompts_of_every_kind_and_arrivals(tmp_path: Path) -> None:
    lines = [
        {"prompt_token_ids": [1, 2], "max_tokens": 4, "arrival_s": 0.5},
        {"prompt": "hi"},
        {"messages": [{"role": "user", "content": "ho"}], "max_tokens": 1},
        {"prompt_len": 9, "max_tokens": 2},
    ]
    path = write(tmp_path / "t.jsonl", "\n".join(map(json.dumps, lines)) + "\n\n")

    calls = [entry.as_call for entry in read_trace(path)]

    assert calls[0] == Call([1, 2], 4, 0.5)
    assert calls[1] == Call("hi", None)
    assert calls[2] == Call([{"role": "user", "content": "ho"}], 1)
    made_up = Recorded(entries=calls, name="t").calls(0, "a")
    assert len(some(made_up, 4)[3].prompt) == 9


def test_a_file_that_is_asked_for_more_begins_again_with_new_made_up_prompts() -> None:
    workload = Recorded(entries=[Call("a", 1), Call("", 2, made_up_len=6)], name="t")

    calls = some(workload.calls(0, "run"), 4)

    assert calls[0] == calls[2]
    assert lengths(calls)[1] == lengths(calls)[3] == (6, 2)
    assert calls[1].prompt != calls[3].prompt


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("[", "cannot be read"),
        ([], "holds no request"),
        ([{"prompt": "a", "prompt_len": 3}], "request 0 needs one of"),
        ([{"prompt": "a"}, {"max_tokens": 3}], "request 1 needs one of"),
        ([{"promt": "a"}], "promt"),
    ],
)
def test_a_trace_that_is_none_is_refused_and_says_where(
    tmp_path: Path, content: object, complaint: str
) -> None:
    with pytest.raises(BadTrace, match=complaint):
        read_trace(write(tmp_path / "t.json", content))


def test_the_opening_of_a_conversation_is_everything_before_the_first_answer(
    tmp_path: Path,
) -> None:
    sharegpt = [
        {
            "id": "x",
            "conversations": [
                {"from": "system", "value": "be short"},
                {"from": "human", "value": "hi"},
                {"from": "gpt", "value": "ho"},
                {"from": "human", "value": "more"},
            ],
        },
        {"conversations": [{"from": "gpt", "value": "I begin"}]},
        {"messages": [{"role": "user", "content": "hey"}]},
    ]

    calls = read_conversations(write(tmp_path / "s.json", sharegpt), max_tokens=7)

    assert calls == [
        Call([{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}], 7),
        Call([{"role": "user", "content": "hey"}], 7),
    ]


def test_conversations_without_a_question_are_no_workload(tmp_path: Path) -> None:
    path = write(tmp_path / "s.json", [{"conversations": [{"from": "gpt", "value": "I begin"}]}])

    with pytest.raises(BadTrace, match="no conversation"):
        read_conversations(path, max_tokens=None)
