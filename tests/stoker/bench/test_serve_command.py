"""`stoker bench serve` from the outside, against a scripted server on a real socket."""

import json
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from stoker.bench.report import ServeReport
from stoker.cli import main
from tests.stoker.bench.http_server import HttpServer
from tests.stoker.bench.scripted_server import Answer, refusal, stream_of

SMALL = ("--random-input-len", "6", "--random-output-len", "3", "--num-prompts", "9")


def three_tokens(*_: object) -> Answer:
    return stream_of([0, 0, 0], prompt=6, cached=0)


@dataclass(frozen=True, slots=True)
class Done:
    """One call of the command."""

    code: int
    out: str
    err: str
    report: ServeReport


Bench = Callable[..., Done]


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    """Calls the command on a server with small synthetic prompts."""

    def run(server: HttpServer, *arguments: str, workload: tuple[str, ...] = SMALL) -> Done:
        path = tmp_path / "report.json"
        where = ("--base-url", server.url, "--json", str(path))
        code = main(["bench", "serve", *where, *workload, *arguments])
        printed = capsys.readouterr()
        report = msgspec.json.decode(path.read_bytes(), type=ServeReport)
        return Done(code, printed.out, printed.err, report)

    return run


def test_a_run_is_printed_and_written_with_what_was_sent(bench: Bench) -> None:
    with HttpServer(three_tokens) as server:
        done = bench(server)

    assert done.code == 0
    (run,) = done.report.runs
    assert (run.figures.sent, run.figures.completed) == (9, 9)
    assert (run.figures.prompt_tokens, run.figures.output_tokens) == (54, 27)
    assert run.figures.cache_hit_rate == 0.0
    assert run.requests is None
    assert done.report.url == f"{server.url}/v1/completions"
    assert done.report.model == "tiny"
    assert done.report.request["prompt"] == "<6 token ids>"
    assert f"sends to {done.report.url}: {json.dumps(done.report.request)}" in done.err
    for word in ("TTFT", "TPOT", "ITL", "end to end", "| output tokens ", "0 (0.0%)"):
        assert word in done.out


def test_case_142_a_default_run_forces_nothing_on_the_server(bench: Bench) -> None:
    with HttpServer(three_tokens) as server:
        bench(server)

    for body in server.bodies:
        assert body.keys() == {"model", "prompt", "max_tokens", "stream", "stream_options"}


def test_case_142_what_the_user_sets_is_sent(bench: Bench) -> None:
    with HttpServer(three_tokens) as server:
        bench(
            server,
            *("--temperature", "0.5", "--top-k", "3", "--ignore-eos"),
            *("--extra-body", '{"min_p": 0.1}', "--cache-salt"),
        )

    (salt,) = {body["cache_salt"] for body in server.bodies}
    assert salt
    for body in server.bodies:
        asked = (body["temperature"], body["top_k"], body["ignore_eos"], body["min_p"])
        assert asked == (0.5, 3, True, 0.1)


def test_case_144_a_server_that_refuses_a_third_is_counted_right_and_fails_the_command(
    bench: Bench,
) -> None:
    with HttpServer(lambda _, i: refusal(503) if i % 3 == 0 else three_tokens()) as server:
        strict = bench(server)
        lenient = bench(server, "--max-failures", "0.34")

    for done in (strict, lenient):
        (run,) = done.report.runs
        assert (run.figures.sent, run.figures.completed, run.figures.failed) == (9, 6, 3)
        assert run.figures.failures == {"HTTP 503": 3}
        assert run.figures.ttft_ms is not None
        assert run.figures.ttft_ms.count == 6
    assert (strict.code, lenient.code) == (1, 0)
    assert "33.3% of the requests of a run failed" in strict.err
    assert "HTTP 503" in strict.out
    assert 'HTTP 503: {"error": {"message": "no"}}' in strict.err


def test_refusals_for_want_of_room_are_shown_apart(bench: Bench) -> None:
    full = refusal(429, Retry_After="4")
    with HttpServer(lambda _, i: full if i == 0 else three_tokens()) as server:
        done = bench(server, "--max-failures", "1")

    (run,) = done.report.runs
    assert (run.figures.refused, run.figures.failed) == (1, 0)
    assert "| Retry-After, s " in done.out
    assert done.code == 0


def test_case_137_a_warm_cache_is_warned_of_unless_it_is_meant(bench: Bench) -> None:
    with HttpServer(lambda *_: stream_of([0, 0], prompt=100, cached=60)) as server:
        plain = bench(server)
        meant = bench(server, "--expect-cache")
        shared = bench(server, "--random-prefix-len", "4")

    assert "warning: 60% of the prompt tokens came from the server's prefix cache" in plain.err
    assert plain.report.runs[0].figures.cache_hit_rate == 0.6
    assert "prefix cache" not in meant.err
    assert "prefix cache" not in shared.err


@pytest.mark.parametrize(
    ("option", "labels"),
    [("--sweep-concurrency=1,3", ["1 at once", "3 at once"]), ("--sweep-rate=500,inf", None)],
)
def test_a_sweep_is_one_row_for_each_run(
    bench: Bench, option: str, labels: list[str] | None
) -> None:
    with HttpServer(three_tokens) as server:
        done = bench(server, option)

    assert [run.figures.completed for run in done.report.runs] == [9, 9]
    rows = [line for line in done.out.splitlines() if line.startswith("| ")]
    assert len(rows) == 4
    assert "TTFT p99" in rows[0]
    for row, label in zip(rows[2:], labels or ["500/s", "all at once"], strict=True):
        assert row.startswith(f"| {label}")


def test_goodput_is_shown_against_its_objectives(bench: Bench) -> None:
    with HttpServer(three_tokens) as server:
        done = bench(server, "--goodput", "ttft:100000", "tpot:100000", "e2el:100000")

    goodput = done.report.runs[0].figures.goodput
    assert goodput is not None
    assert (goodput.met, goodput.share) == (9, 1.0)
    assert "goodput (ttft 100000 ms, tpot 100000 ms, e2el 100000 ms)" in done.out


def test_a_detailed_report_has_each_request(bench: Bench) -> None:
    with HttpServer(three_tokens) as server:
        done = bench(server, "--detailed")

    requests = done.report.runs[0].requests
    assert requests is not None
    assert len(requests) == 9
    assert all(request.due_s <= request.sent_s <= request.end_s for request in requests)


def test_json_alone_is_all_that_is_printed_when_it_goes_to_the_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with HttpServer(three_tokens) as server:
        assert main(["bench", "serve", "--base-url", server.url, *SMALL, "--json", "-"]) == 0

    report = msgspec.json.decode(capsys.readouterr().out, type=ServeReport)
    assert report.runs[0].figures.completed == 9


def test_chats_are_sent_to_the_chat_route_as_words(bench: Bench) -> None:
    with HttpServer(three_tokens) as server:
        bench(server, "--endpoint", "chat")

    assert {asked.path for asked in server.asked[1:]} == {"/v1/chat/completions"}
    (message,) = server.bodies[0]["messages"]  # type: ignore[misc]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 6


def test_files_of_every_kind_can_be_sent(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(
        json.dumps([{"prompt_token_ids": [1, 2], "max_tokens": 3, "arrival_s": 0.0}])
    )
    (tmp_path / "share.json").write_text(
        json.dumps([{"conversations": [{"from": "human", "value": "hi"}]}])
    )
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    sent = []
    for workload in (
        ("--trace", str(tmp_path / "trace.json")),
        ("--sharegpt", str(tmp_path / "share.json"), "--max-tokens", "7"),
        ("--prompts-file", str(tmp_path / "prompts.txt")),
    ):
        with HttpServer(three_tokens) as server:
            assert bench(server, workload=workload).code == 0
            sent.append([(body["prompt"], body.get("max_tokens")) for body in server.bodies])

    assert sent == [[([1, 2], 3)], [("hi", 7)], [("one", None), ("two", None)]]


def test_the_key_and_headers_go_with_every_request(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HttpServer(three_tokens, key="k") as server:
        assert bench(server, "--api-key", "k", "--header", "X-Team: a:b").code == 0
        monkeypatch.setenv("STOKER_API_KEY", "k")
        assert bench(server).code == 0

    assert server.asked[1].headers["x-team"] == "a:b"


def test_a_base_url_may_end_in_v1(bench: Bench) -> None:
    with HttpServer(three_tokens) as server:
        server.url += "/v1/"
        assert bench(server).report.url.count("/v1") == 1


def test_a_server_that_lists_no_models_needs_a_name(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    with HttpServer(three_tokens, models_status=404) as server:
        assert main(["bench", "serve", "--base-url", server.url, *SMALL]) == 1
        assert "lists no model (HTTP 404 from /v1/models)" in capsys.readouterr().err
        done = bench(server, "--model", "mine")

    assert done.report.model == "mine"
    assert server.bodies[-1]["model"] == "mine"


def test_a_wrong_key_is_said_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with HttpServer(three_tokens, key="k") as server:
        assert main(["bench", "serve", "--base-url", server.url, *SMALL]) == 1

    assert "refuses the key; give one with --api-key" in capsys.readouterr().err
    assert server.bodies == []


def test_where_no_server_is_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert main(["bench", "serve", "--base-url", url, *SMALL]) == 1

    assert f"no server answers at {url}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--extra-body", "[1]"], "must be a JSON object"),
        (["--extra-body", "{"], "is not JSON"),
        (["--extra-body", '{"n": 2}'], "latencies per token"),
        (["--trace", "nowhere.json"], "nowhere.json"),
        (["--header", "no colon"], "NAME: VALUE"),
        (["--base-url", "localhost"], "no address of a server"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_reason(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with HttpServer(three_tokens) as server:
        assert main(["bench", "serve", "--base-url", server.url, *arguments]) == 1

    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--goodput", "itl:3"],
        ["--random-input-len", "0"],
        ["--request-rate", "0"],
        ["--sweep-rate", "1,x"],
        ["--sweep-concurrency", "0"],
        ["--num-prompts", "0"],
        ["--burstiness", "-1"],
        ["--random-token-ids", "9-3"],
        ["--trace", "a", "--sharegpt", "b"],
    ],
)
def test_wrong_options_are_wrong_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", *arguments])

    assert ended.value.code == 2
    assert "--help` tells more" in capsys.readouterr().err


def test_without_matplotlib_a_plot_is_refused_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with HttpServer(three_tokens) as server:
        plot = ["--plot", str(tmp_path / "p.png")]
        assert main(["bench", "serve", "--base-url", server.url, *SMALL, *plot]) == 1

    assert "stoker[plot]" in capsys.readouterr().err
    assert server.asked == []


@pytest.mark.slow
@pytest.mark.parametrize("how", [[], ["--sweep-concurrency", "1,2,4"]], ids=["one run", "sweep"])
def test_a_plot_is_a_picture_even_with_failures_in_it(
    bench: Bench, tmp_path: Path, how: list[str]
) -> None:
    path = tmp_path / "plot.png"
    with HttpServer(lambda _, i: refusal(503) if i % 4 == 0 else three_tokens()) as server:
        bench(server, *how, "--max-failures", "1", "--plot", str(path))

    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 10_000
