from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.frontend.stop_strings import MAX_STOP_CHARS, StopStrings
from scheduler.errors import InvalidRequest


def run(
    pieces: list[str], stops: list[str], *, include: bool = False
) -> tuple[list[str], str | None]:
    search = StopStrings(stops, include_in_output=include)
    out: list[str] = []
    for piece in pieces:
        out.append(search.feed(piece))
        if search.matched is not None:
            return out, search.matched
    return [*out, search.flush()], None


def expected(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """The rule, in the slowest way: look at every end, first at the longest stop string."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def test_a_possible_beginning_is_held_until_it_cannot_become_a_stop_string() -> None:
    out, matched = run(["one ST", "O", "x STOP", "y"], ["STOP!"])

    assert out == ["one ", "", "STOx ", "STOPy", ""]
    assert matched is None


def test_held_text_comes_out_at_the_end() -> None:
    assert run(["one STO"], ["STOP"]) == (["one ", "STO"], None)


def test_nothing_of_a_stop_string_over_many_pieces_is_given_out() -> None:
    assert run(["a", "S", "T", "O", "P", "b"], ["STOP"]) == (["a", "", "", "", ""], "STOP")


def test_the_stop_string_is_kept_when_asked_and_nothing_after_it() -> None:
    assert run(["a ST", "OP b"], ["STOP"], include=True) == (["a ", "STOP"], "STOP")


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert run(["xabcd"], ["abcd", "bc"]) == (["xa"], "bc")
    assert run(["x", "a", "b", "c", "d"], ["abcd", "bc"]) == (["x", "", "", "a"], "bc")


def test_of_stop_strings_that_end_together_the_longest_wins() -> None:
    assert run(["xabc"], ["c", "bc", "abc"]) == (["x"], "abc")


def test_a_repeated_beginning_is_not_missed() -> None:
    assert run(["aaa", "ab"], ["aab"]) == (["a", "a"], "aab")
    assert run(["\n", "\n", "\n", "x"], ["\n\nx"]) == (["", "", "\n", ""], "\n\nx")


def test_without_stop_strings_text_passes_at_once() -> None:
    assert run(["a", "b"], []) == (["a", "b", ""], None)


def test_text_that_may_not_stop_lets_a_stop_string_pass_but_not_one_that_ends_later() -> None:
    search = StopStrings(["stop", "and on"])

    assert search.feed("stop an", may_stop=False) == "stop "
    assert search.feed("d on") == ""
    assert search.matched == "and on"


def test_a_stop_string_that_may_not_stop_is_not_held() -> None:
    search = StopStrings(["stop"])

    assert search.feed("stop", may_stop=False) == "stop"


def test_nothing_may_be_fed_after_a_match() -> None:
    search = StopStrings(["a"])
    search.feed("a")
    with pytest.raises(AssertionError):
        search.feed("b")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="non-empty"):
        StopStrings(["a", ""])


def test_too_many_characters_are_refused_with_both_numbers() -> None:
    StopStrings(["x" * MAX_STOP_CHARS])
    with pytest.raises(InvalidRequest, match=f"{MAX_STOP_CHARS + 1} characters.*{MAX_STOP_CHARS}"):
        StopStrings(["x" * MAX_STOP_CHARS, "y"])


@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=5),
    borders=st.lists(st.integers(0, 30), max_size=8),
    include=st.booleans(),
)
def test_the_result_depends_on_the_text_and_not_on_its_pieces(
    text: str, stops: list[str], borders: list[int], include: bool
) -> None:
    cuts = sorted({0, len(text), *(border for border in borders if border < len(text))})
    pieces = [text[a:b] for a, b in pairwise(cuts)]

    out, matched = run(pieces, stops, include=include)

    assert ("".join(out), matched) == expected(text, stops, include=include)


@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=5),
)
def test_only_text_that_could_begin_a_stop_string_is_held(text: str, stops: list[str]) -> None:
    search = StopStrings(stops)
    given_out = ""
    for end in range(1, len(text) + 1):
        given_out += search.feed(text[end - 1])
        if search.matched is not None:
            break
        held = text[len(given_out) : end]
        assert not held or any(stop.startswith(held) for stop in stops)
