"""The judge of a storm finds what it is there to find."""

import pytest

from bench.chaos.calls import KINDS, make_calls
from bench.chaos.judge import judge, stalls_at, token_rate
from bench.chaos.load import Answer

CALL = make_calls(1, seed=0, max_tokens=64, max_prompt=64)[0]


def answer(tokens: list[int], *, error: str = "", text: str = "") -> Answer:
    return Answer(CALL, [tokens], finish=["length"], text=[text], logprobs=[-0.5], error=error)


RIGHT = {0: answer([1, 2, 3, 4, 5])}


def test_what_is_as_it_was_is_clean() -> None:
    verdict = judge([answer([1, 2, 3, 4, 5])], RIGHT)
    assert verdict.is_clean
    assert (verdict.num_streams, verdict.num_tokens) == (1, 5)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (answer([1, 2, 3]), "short"),
        (answer([1, 2, 2, 3, 4, 5]), "doubled"),
        (answer([1, 2, 3, 1, 2, 3, 4, 5]), "doubled"),
        (answer([1, 2, 9, 4, 5]), "changed"),
        (answer([1, 2, 4, 5]), "changed"),
        (answer([1, 2, 3, 4, 5], text="other"), "changed"),
        (answer([1, 2], error="EngineLost"), "dropped"),
    ],
)
def test_each_harm_has_its_name(given: Answer, kind: str) -> None:
    verdict = judge([given], RIGHT)
    assert not verdict.is_clean
    assert getattr(verdict, kind)


def test_a_stall_is_the_pause_around_a_moment_of_the_streams_alive_then() -> None:
    one = Answer(CALL, [[1, 2]], at=[0.0, 1.0, 4.0], num_tokens=[1, 1])
    other = Answer(CALL, [[1]], at=[5.0, 6.0], num_tokens=[1])
    assert stalls_at([one, other], [2.0]) == [3.0]
    assert token_rate([one, other], [(0.5, 1.5), (5.5, 6.5)]) == 1.0


def test_calls_are_of_every_kind_and_the_same_again() -> None:
    calls = make_calls(40, seed=1, max_tokens=64, max_prompt=200)
    assert {call.kind for call in calls} == set(KINDS)
    assert calls == make_calls(40, seed=1, max_tokens=64, max_prompt=200)
