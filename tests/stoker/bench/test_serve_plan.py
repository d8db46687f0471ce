"""Which runs a call of `stoker bench serve` makes."""

import math
from itertools import islice

import pytest

from stoker.bench.errors import BenchError
from stoker.bench.lengths import LengthMix
from stoker.bench.report import Point
from stoker.bench.request_form import RequestForm
from stoker.bench.serve_plan import ServePlan, Tempo, measure
from stoker.bench.workload import Call, Recorded, Synthetic, Workload
from tests.stoker.bench.scripted_server import Answer, Body, Script, ScriptedServer, stream_of
from tests.stoker.bench.virtual_time import run_in_virtual_time

SYNTHETIC = Synthetic(input_len=LengthMix.parse("8-32"), output_len=LengthMix.parse("2"))


def plan(workload: Workload = SYNTHETIC, **fields: object) -> ServePlan:
    values: dict[str, object] = {
        "form": RequestForm("completions", "m", {}),
        "workload": workload,
        "tempos": [Tempo(max_concurrency=4)],
        "num_prompts": 8,
    }
    return ServePlan(**(values | fields))  # type: ignore[arg-type]


def measured(wanted: ServePlan, script: Script) -> tuple[list[Point], list[Body]]:
    server = ScriptedServer(script)
    points = run_in_virtual_time(lambda clock: measure(wanted, server.post, clock))
    return points, server.bodies


def two_tokens(*_: object) -> Answer:
    return stream_of([0.1, 0.1])


class PrefixCache:
    """A server that knows every prompt that it has seen, if the salt is the same."""

    def __init__(self) -> None:
        self._seen: set[tuple[object, ...]] = set()

    def __call__(self, body: Body, _: int) -> Answer:
        prompt = body["prompt"]
        assert isinstance(prompt, list)
        key = (body.get("cache_salt"), *prompt)
        is_known = key in self._seen
        self._seen.add(key)
        size = len(prompt)
        return stream_of([0.01 if is_known else 0.1, 0.1], prompt=size, cached=size * is_known)


def rates_of_two_calls(script: Script, wanted: ServePlan) -> list[Point]:
    """As if the command were called twice with the same arguments."""
    server = ScriptedServer(script)

    async def twice(clock: object) -> list[Point]:
        first = await measure(wanted, server.post, clock)  # type: ignore[arg-type]
        return first + await measure(wanted, server.post, clock)  # type: ignore[arg-type]

    return run_in_virtual_time(twice)


def test_case_137_a_second_run_of_one_seed_finds_nothing_in_the_cache_and_is_no_quicker() -> None:
    first, second = rates_of_two_calls(PrefixCache(), plan())

    assert second.figures.cache_hit_rate == 0.0
    assert first.figures.prompt_tokens == second.figures.prompt_tokens
    assert first.figures.ttft_ms is not None
    assert second.figures.ttft_ms is not None
    assert second.figures.ttft_ms.mean == pytest.approx(first.figures.ttft_ms.mean)
    assert second.warnings == []


def test_case_137_a_warm_cache_is_measured_and_warned_of() -> None:
    workload = Recorded(entries=[Call([i] * 30, 2) for i in range(8)], name="trace.json")

    first, second = rates_of_two_calls(PrefixCache(), plan(workload))

    assert (first.figures.cache_hit_rate, second.figures.cache_hit_rate) == (0.0, 1.0)
    assert first.warnings == []
    (warning,) = second.warnings
    assert "100% of the prompt tokens" in warning


def test_case_137_a_salt_for_each_run_keeps_the_cache_cold_for_prompts_that_repeat() -> None:
    workload = Recorded(entries=[Call([i] * 30, 2) for i in range(8)], name="trace.json")

    first, second = rates_of_two_calls(PrefixCache(), plan(workload, is_salted=True))

    assert (first.figures.cache_hit_rate, second.figures.cache_hit_rate) == (0.0, 0.0)


def test_a_sweep_makes_one_run_for_each_tempo_with_prompts_of_its_own() -> None:
    tempos = [Tempo(max_concurrency=count) for count in (1, 2, 8)]

    points, bodies = measured(plan(tempos=tempos), two_tokens)

    assert [point.figures.peak_concurrency for point in points] == [1, 2, 8]
    assert [point.figures.completed for point in points] == [8, 8, 8]
    assert [point.figures.output_tokens_per_s for point in points] == pytest.approx([10, 20, 80])
    assert len({tuple(body["prompt"]) for body in bodies}) == 24  # type: ignore[arg-type]


def test_a_rate_spreads_requests_over_time() -> None:
    (point,), _ = measured(
        plan(tempos=[Tempo(request_rate=10.0)], num_prompts=400, seed=3), two_tokens
    )

    assert point.figures.requests_per_s == pytest.approx(10, rel=0.15)
    assert point.arrivals == "10/s, Poisson"


@pytest.mark.parametrize(
    ("tempo", "words"),
    [
        (Tempo(), "all at once"),
        (Tempo(request_rate=math.inf), "all at once"),
        (Tempo(max_concurrency=3), "3 at a time"),
        (Tempo(request_rate=math.inf, max_concurrency=3), "3 at a time"),
        (Tempo(request_rate=2.0, max_concurrency=3), "2/s, Poisson, at most 3 at once"),
    ],
)
def test_how_requests_arrive_is_said_in_words(tempo: Tempo, words: str) -> None:
    assert plan().pace(tempo)[1] == words


def test_a_trace_with_arrivals_is_sent_at_its_own_times() -> None:
    entries = [Call([1], 2, arrival_s=at) for at in (0.0, 2.0, 5.0)]
    wanted = plan(
        Recorded(entries=entries, name="t"),
        tempos=[Tempo()],
        num_prompts=None,
        keeps_requests=True,
    )

    (point,), _ = measured(wanted, two_tokens)

    assert point.requests is not None
    assert [record.due_s for record in point.requests] == pytest.approx([0.0, 2.0, 5.0])
    assert point.arrivals == "as in the trace"


def test_a_pace_that_is_given_wins_over_the_arrivals_of_a_trace() -> None:
    workload = Recorded(entries=[Call([1], 2, arrival_s=9.0)], name="t")

    assert plan(workload).pace(Tempo(max_concurrency=2))[1] == "2 at a time"


def test_warm_ups_come_first_and_are_not_counted() -> None:
    (point,), bodies = measured(plan(num_warmups=3), two_tokens)

    assert len(bodies) == 11
    assert point.figures.sent == 8
    assert [body["max_tokens"] for body in bodies[:3]] == [8, 8, 8]
    assert point.figures.duration_s == pytest.approx(0.4)


def test_a_duration_alone_goes_on_until_it_is_over() -> None:
    (point,), _ = measured(plan(num_prompts=None, duration_s=2.0), two_tokens)

    assert point.figures.sent == 40


@pytest.mark.parametrize(
    "fields",
    [
        {"num_prompts": None, "duration_s": 2.0, "tempos": [Tempo()]},
        {"num_prompts": None, "duration_s": 2.0, "tempos": [Tempo(request_rate=math.inf)]},
        {
            "workload": Recorded(entries=[Call([1], 2, arrival_s=0.0)], name="t"),
            "num_prompts": 2,
            "tempos": [Tempo()],
        },
    ],
    ids=["no pace", "endless rate", "more than the trace"],
)
def test_settings_that_do_not_fit_together_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(BenchError, match="give --request-rate"):
        plan(**fields)


def test_as_many_are_sent_as_a_file_has_unless_said_otherwise() -> None:
    three = Recorded(entries=[Call([i], 2) for i in range(3)], name="t")

    assert plan(three, num_prompts=None).count == 3
    assert plan(num_prompts=None).count == 100
    assert len(list(islice(plan(three, num_prompts=7).sendings("a"), 20))) == 7
