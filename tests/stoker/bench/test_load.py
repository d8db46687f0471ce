"""Loads, their records and their figures, on a server whose every delay is known."""

import pytest

from stoker.bench.figures import Figures, figures_of, warnings_of
from stoker.bench.load import Load, Pace, Run, Sending, most_under_way
from stoker.bench.record import Outcome, Record, shares
from tests.stoker.bench.scripted_server import (
    DONE,
    Answer,
    Script,
    ScriptedServer,
    refusal,
    stream_of,
    text_chunk,
    usage,
    usage_chunk,
)
from tests.stoker.bench.virtual_time import run_in_virtual_time


def loaded(
    script: Script,
    count: int = 1,
    *,
    arrivals: list[float] | None = None,
    max_concurrency: int | None = None,
    asked: int | None = None,
    **pace: float,
) -> Run:
    """A run of `count` requests, all at once unless said otherwise."""
    if arrivals is None and max_concurrency is None:
        arrivals = [0.0] * count
    limits = Pace(arrivals=arrivals, max_concurrency=max_concurrency, **pace)
    server = ScriptedServer(script)

    return run_in_virtual_time(
        lambda clock: Load(server.post, limits, clock).run([Sending(b"{}", asked)] * count)
    )


def figures(script: Script, count: int = 1, **how: object) -> Figures:
    return figures_of(loaded(script, count, **how))  # type: ignore[arg-type]


def only(run: Run) -> Record:
    (record,) = run.records
    return record


def near(value: float) -> float:
    return pytest.approx(value, rel=1e-6, abs=1e-9)  # type: ignore[no-any-return]


# --- times and tokens of one request ---


def test_known_delays_give_exact_latencies() -> None:
    found = figures(lambda *_: stream_of([0.2, 0.05, 0.05, 0.1]))

    assert found.ttft_ms is not None
    assert found.tpot_ms is not None
    assert found.itl_ms is not None
    assert found.e2e_ms is not None
    assert found.ttft_ms.mean == near(200)
    assert found.tpot_ms.mean == near(200 / 3)
    assert (found.itl_ms.count, found.itl_ms.p50, found.itl_ms.max) == (3, near(50), near(100))
    assert found.e2e_ms.mean == near(400)
    assert found.duration_s == near(0.4)
    assert found.output_tokens_per_s == near(10)
    assert found.input_tokens_per_s == near(25)
    assert found.requests_per_s == near(2.5)


def test_case_141_the_time_per_token_leaves_the_first_token_and_answers_of_one_out() -> None:
    one_token = figures(lambda *_: stream_of([0.3]))
    two_tokens = figures(lambda *_: stream_of([0.3, 0.1]))
    both = figures(lambda _, i: stream_of([0.3, 0.1][: i + 1]), 2)

    assert one_token.tpot_ms is None
    assert one_token.itl_ms is None
    assert one_token.ttft_ms is not None
    assert one_token.ttft_ms.mean == near(300)
    assert two_tokens.tpot_ms is not None
    assert two_tokens.tpot_ms.mean == near(100)
    assert both.tpot_ms is not None
    assert (both.tpot_ms.count, both.tpot_ms.mean) == (1, near(100))


def test_case_141_rates_are_of_the_run_alone_whatever_was_before_it() -> None:
    server = ScriptedServer(lambda *_: stream_of([0.5, 0.5]))
    pace = Pace(arrivals=None, max_concurrency=1)

    async def two_runs(clock: object) -> list[Run]:
        loads = [Load(server.post, pace, clock) for _ in range(2)]  # type: ignore[arg-type]
        return [await load.run([Sending(b"{}", None)] * 2) for load in loads]

    first, second = map(figures_of, run_in_virtual_time(two_runs))

    assert first.output_tokens_per_s == near(2)
    assert second.output_tokens_per_s == near(2)
    assert second.duration_s == near(2)


def test_case_139_three_chunks_of_two_tokens_are_two_tokens() -> None:
    run = loaded(lambda *_: stream_of([0.1, 0.03, 0.05], tokens=2))
    found = figures_of(run)

    assert only(run).num_chunks == 3
    assert found.output_tokens == 2
    assert found.tpot_ms is not None
    assert found.tpot_ms.mean == near(80)
    assert found.itl_ms is not None
    assert found.itl_ms.mean == near(80)
    assert found.tokens_per_chunk == near(2 / 3)


def test_several_tokens_in_one_chunk_share_the_gap_before_it() -> None:
    found = figures(lambda *_: stream_of([0.1, 0.2, 0.2], tokens=9))

    assert found.tpot_ms is not None
    assert found.itl_ms is not None
    assert found.chunk_gap_ms is not None
    assert found.tpot_ms.mean == near(50)
    assert found.itl_ms.p50 == near(50)
    assert found.chunk_gap_ms.p50 == near(200)


def test_where_the_server_says_what_each_chunk_brought_its_gap_is_divided_by_that() -> None:
    pieces = [
        (0.1, text_chunk("a", usage=usage(5, 1))),
        (0.3, text_chunk("bcd", usage=usage(5, 4))),
        (0.1, text_chunk("e", "length", usage=usage(5, 5))),
    ]
    found = figures(lambda *_: Answer(pieces))

    assert found.output_tokens == 5
    assert found.itl_ms is not None
    assert (found.itl_ms.min, found.itl_ms.max) == (near(100), near(100))


def test_a_chunk_that_brought_no_token_belongs_to_the_next_gap() -> None:
    pieces = [
        (0.1, text_chunk("a", usage=usage(5, 1))),
        (0.02, text_chunk("'", usage=usage(5, 1))),
        (0.08, text_chunk("b", "length", usage=usage(5, 2))),
    ]
    found = figures(lambda *_: Answer(pieces))

    assert found.itl_ms is not None
    assert (found.itl_ms.count, found.itl_ms.mean) == (1, near(100))


@pytest.mark.parametrize(
    ("num_chunks", "num_tokens", "running", "expected"),
    [
        (0, 0, [], ()),
        (1, 5, [], ()),
        (3, 1, [], (0.0, 0.0)),
        (4, 4, [], (1.0, 1.0, 1.0)),
        (3, 5, [], (2.0, 2.0)),
        (3, 9, [1, 2, 9], (1.0, 7.0)),
        (3, 9, [1, 9], (4.0, 4.0)),
    ],
)
def test_tokens_are_shared_out_over_the_gaps_to_the_last_one(
    num_chunks: int, num_tokens: int, running: list[int], expected: tuple[float, ...]
) -> None:
    assert shares(num_chunks, num_tokens, running) == expected


def test_an_answer_without_usage_counts_for_latencies_but_not_for_tokens() -> None:
    answer = Answer([(0.1, text_chunk("a")), (0.1, text_chunk("b", "length")), (0.0, DONE)])
    found = figures(lambda *_: answer)

    assert (found.completed, found.without_usage, found.output_tokens) == (1, 1, 0)
    assert found.tpot_ms is None
    assert found.itl_ms is None
    assert found.ttft_ms is not None
    assert any("without usage" in warning for warning in warnings_of(found, expects_cache=False))


# --- open loop, closed loop ---


def test_an_open_loop_sends_on_time_however_slow_the_server_is() -> None:
    run = loaded(lambda *_: stream_of([10.0]), 3, arrivals=[0.0, 1.0, 2.5])

    assert [record.sent_s for record in run.records] == [near(0), near(1), near(2.5)]
    assert most_under_way(run.records) == 3
    assert run.ended_s - run.began_s == near(12.5)


def test_a_closed_loop_keeps_as_many_under_way_as_it_is_told() -> None:
    run = loaded(lambda *_: stream_of([0.5, 0.5]), 6, max_concurrency=2)

    assert most_under_way(run.records) == 2
    assert run.ended_s == near(3)
    assert sorted(record.due_s for record in run.records) == list(map(near, [0, 0, 1, 1, 2, 2]))
    assert {round(record.e2e_s, 6) for record in run.records} == {1.0}


def test_waiting_for_a_place_counts_because_the_request_was_due() -> None:
    """Without this, a slow server would slow its own measurement down and look quick."""
    run = loaded(lambda *_: stream_of([1.0]), 4, arrivals=[0.0, 0.1, 0.2, 0.3], max_concurrency=1)

    assert [record.ttft_s for record in run.records] == list(map(near, [1.0, 1.9, 2.8, 3.7]))
    assert [record.lag_s for record in run.records] == list(map(near, [0, 0, 0, 0]))
    assert most_under_way(run.records) == 1


def test_a_client_that_is_late_says_so() -> None:
    """The clock of this client runs on while it encodes, as with a machine that is too slow."""
    server = ScriptedServer(lambda *_: stream_of([0.1]))

    async def late(clock: object) -> Run:
        reads = [0.0]

        def slow_clock() -> float:
            reads[0] += 0.05
            return clock() + reads[0]  # type: ignore[operator,no-any-return]

        return await Load(server.post, Pace(arrivals=[0.0], max_concurrency=None), slow_clock).run(
            [Sending(b"{}", None)]
        )

    found = figures_of(run_in_virtual_time(late))

    assert found.client_lag_ms is not None
    assert found.client_lag_ms.p99 >= 50
    assert any(
        "sent requests late" in warning for warning in warnings_of(found, expects_cache=True)
    )


def test_a_client_that_uses_a_whole_core_says_so() -> None:
    run = loaded(lambda *_: stream_of([1.0]))

    busy, idle = (figures_of(run, client_cpu_s=seconds) for seconds in (0.95, 0.2))

    assert any("of a core" in warning for warning in warnings_of(busy, expects_cache=False))
    assert warnings_of(idle, expects_cache=False) == []


def test_after_the_duration_nothing_is_sent_and_what_runs_is_waited_for() -> None:
    open_loop = loaded(
        lambda *_: stream_of([3.0]), 5, arrivals=[0.0, 1.0, 2.0, 3.0, 4.0], duration_s=2.0
    )
    closed = loaded(lambda *_: stream_of([0.4]), 50, max_concurrency=1, duration_s=1.0)

    assert len(open_loop.records) == 2
    assert open_loop.ended_s == near(4)
    assert len(closed.records) == 3


# --- failures ---


def test_case_144_failures_are_counted_by_reason_and_are_part_of_no_latency() -> None:
    def script(_: object, i: int) -> Answer:
        match i % 4:
            case 0:
                return refusal(503)
            case 1:
                return Answer([(0.001, text_chunk("quick"))], is_cut=True)
            case 2:
                return Answer([(0.001, text_chunk("x", "abort"))])
            case _:
                return stream_of([0.2, 0.1])

    found = figures(script, 12)

    assert (found.sent, found.completed, found.failed, found.refused) == (12, 3, 9, 0)
    assert found.failures == {"HTTP 503": 3, "ConnectionResetError": 3, "finish_reason abort": 3}
    assert found.failure_share == near(0.75)
    for spread, value in ((found.ttft_ms, 200), (found.e2e_ms, 300)):
        assert spread is not None
        assert (spread.count, spread.min, spread.max) == (3, near(value), near(value))
    assert found.output_tokens == 6
    assert found.requests_per_s == near(10)


def test_refusals_are_counted_apart_with_what_they_said_about_coming_again() -> None:
    def script(_: object, i: int) -> Answer:
        return refusal(429, retry_after=str(i)) if i % 2 else stream_of([0.1])

    run = loaded(script, 4)
    found = figures_of(run)

    assert (found.completed, found.refused, found.failed) == (2, 2, 0)
    assert found.retry_after_s is not None
    assert (found.retry_after_s.min, found.retry_after_s.max) == (1, 3)
    assert {record.outcome for record in run.records} == {Outcome.OK, Outcome.REFUSED}
    assert found.failure_share == near(0.5)


def test_an_answer_that_takes_too_long_is_a_failure() -> None:
    record = only(loaded(lambda *_: stream_of([1.0, 9.0]), timeout_s=5.0))

    assert (record.outcome, record.reason) == (Outcome.FAILED, "timeout")
    assert record.end_s == near(5)


def test_an_answer_without_tokens_is_a_failure_unless_none_were_asked_for() -> None:
    empty = Answer([(0.1, text_chunk("", "stop")), (0.0, usage_chunk(4, 0)), (0.0, DONE)])

    assert only(loaded(lambda *_: empty, asked=5)).reason == "no tokens"
    assert only(loaded(lambda *_: empty, asked=0)).outcome is Outcome.OK


def test_answers_shorter_than_asked_for_are_told_of() -> None:
    found = figures(lambda *_: stream_of([0.1, 0.1]), 3, asked=5)

    assert found.ended_early == 3
    assert any("--ignore-eos" in warning for warning in warnings_of(found, expects_cache=False))


# --- judgement ---


def test_goodput_counts_what_keeps_every_objective_and_failures_never_do() -> None:
    def script(_: object, i: int) -> Answer:
        return [
            stream_of([0.1, 0.02]),
            stream_of([0.1, 0.2]),
            stream_of([0.5, 0.02]),
            stream_of([0.1]),
            refusal(503),
        ][i]

    run = loaded(script, 5)

    found = figures_of(run, objectives_ms={"ttft": 200, "tpot": 50}).goodput
    assert found is not None
    assert (found.met, found.share) == (2, near(0.4))
    assert found.requests_per_s == near(2 / 0.52)
    strict = figures_of(run, objectives_ms={"e2el": 150}).goodput
    assert strict is not None
    assert strict.met == 2


def test_a_warm_cache_is_told_of_unless_it_is_meant() -> None:
    warm = figures(lambda *_: stream_of([0.1], prompt=100, cached=6), 2)
    cold = figures(lambda *_: stream_of([0.1], prompt=100, cached=5), 2)

    assert (warm.cached_tokens, warm.cache_hit_rate) == (12, near(0.06))
    assert any("prefix cache" in warning for warning in warnings_of(warm, expects_cache=False))
    assert warnings_of(warm, expects_cache=True) == []
    assert warnings_of(cold, expects_cache=False) == []


def test_a_server_that_says_nothing_of_its_cache_has_no_hit_rate() -> None:
    found = figures(lambda *_: stream_of([0.1]))

    assert (found.cached_tokens, found.cache_hit_rate) == (None, None)


def test_a_run_in_which_everything_failed_still_has_figures() -> None:
    found = figures(lambda *_: refusal(500), 3)

    assert (found.completed, found.failed, found.failure_share) == (0, 3, 1.0)
    assert (found.ttft_ms, found.itl_ms, found.e2e_ms, found.tokens_per_chunk) == (None,) * 4
