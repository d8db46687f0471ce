"""The `stoker` command against an engine without a model."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.request import Ended, Finish, Rejection
from stoker.cli import main
from stoker.client import Client
from stoker.running import announced
from tests.cluster.frontend.fake_engine import (
    ANSWER,
    FakeEngine,
    answer_at_once,
    ipc_address,
    tokens,
)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    with FakeEngine(ipc_address(tmp_path), script=answer_at_once) as fake:
        yield fake


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


@pytest.mark.parametrize(
    "command", ["generate", "chat", "serve", "status", "bench", "fetch", "version"]
)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])

    assert ended.value.code == 0
    assert f"stoker {command}" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_settings_have_the_names_that_users_know(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])

    text = capsys.readouterr().out
    for option in (
        "--tensor-parallel-size",
        "--gpu-memory-utilization",
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--max-model-len",
        "--block-size",
        "--no-enable-prefix-caching",
        "--num-kv-blocks",
        "--kv-cache-memory-bytes",
        "--dtype",
        "--backend",
        "--num-groups",
        "--data-parallel-size",
        "--scheduling-policy",
        "--long-prefill-token-threshold",
        "--journal",
    ):
        assert option in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["generate", "--no-such"], "unrecognized arguments: --no-such"),
        (["generate", "--tempratur=1"], "--tempratur=1. Did you mean --temperature?"),
        (["serve", "m", "--tensor-paralel-size", "2"], "Did you mean --tensor-parallel-size?"),
        (["serve", "--max-num-seqs", "many"], "--max-num-seqs: invalid int value: 'many'"),
        (
            ["bench", "latency", "--num-iters", "1", "--no-such"],
            "unrecognized arguments: --no-such",
        ),
        (["fetch"], "required: MODEL"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_it_in_two_lines(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)

    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert says in error
    assert error.count("\n") == 2
    assert "--help` tells more" in error


@pytest.mark.parametrize("asked", ["version", "--version"])
def test_the_version_is_told_either_way(asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([asked]) == 0
    assert re.fullmatch(r"stoker \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_without_a_command_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Answer prompts through a cluster" in capsys.readouterr().err


def test_generate_prints_answers_and_then_figures(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["generate", "--address", engine.address, "--prompt", "one", "--prompt", "two"])

    printed = capsys.readouterr()
    assert code == 0
    assert printed.out.split("\n\n") == [
        f"[1/2] one\n{ANSWER.strip()}",
        f"[2/2] two\n{ANSWER.strip()}",
        "",
    ]
    for name in (
        "requests",
        "prompt tokens",
        "tokens from cache",
        "output tokens",
        "TTFT",
        "ITL",
        "tokens/s",
        "steps",
        "mixed steps",
        "preemptions",
        "blocks used",
    ):
        assert name in printed.err


def test_generate_can_leave_the_figures_out(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["generate", "--address", engine.address, "--prompt", "one", "--no-stats"])

    assert capsys.readouterr().err == ""


def test_markup_in_prompts_is_text(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", "--address", engine.address, "--prompt", "[bold]x[/nope] :smile:"])

    assert "[1/1] [bold]x[/nope] :smile:" in capsys.readouterr().out


def test_a_long_prompt_is_shown_by_its_ends(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.info = engine.hello_answer = type(engine.info)(
        **{name: getattr(engine.info, name) for name in engine.info.__struct_fields__}
        | {"max_model_len": 100_000}
    )

    main(["generate", "--address", engine.address, "--prompt", "a" * 900 + "the end"])

    out = capsys.readouterr().out
    assert "[…]" in out
    assert "the end\n" in out
    assert "a" * 300 not in out


def test_generate_reads_one_prompt_a_line(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\n  two  \n")

    main(["generate", "--address", engine.address, "--prompts-file", str(file), "--json"])

    answers = json.loads(capsys.readouterr().out)["answers"]
    assert [answer["given"] for answer in answers] == ["one", "two"]


def test_generate_reads_standard_input(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe(monkeypatch, "one\ntwo\n")

    main(["generate", "--address", engine.address, "--json", "--max-tokens", "2"])

    document = json.loads(capsys.readouterr().out)
    assert [answer["given"] for answer in document["answers"]] == ["one", "two"]
    assert document["summary"]["requests"] == 2
    assert document["summary"]["output_tokens"] == 4
    assert document["summary"]["cached_tokens"] == 4


def test_generate_sends_chats_through_the_template(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    entries: list[object] = ["hi", {"prompt": "ho"}, [{"role": "user", "content": "hey"}]]
    file.write_text("\n".join(map(json.dumps, entries)))

    main(
        [
            "generate",
            "--address",
            engine.address,
            "--prompts-file",
            str(file),
            "--json",
            "--chat",
            "--system",
            "short",
        ]
    )

    answers = json.loads(capsys.readouterr().out)["answers"]
    for answer, said in zip(answers, ["hi", "ho", "hey"], strict=True):
        assert answer["prompt"] == (
            f"<|im_start|>system\nshort<|im_end|>\n<|im_start|>user\n{said}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )


def test_sampling_options_reach_the_engine(engine: FakeEngine) -> None:
    main(["generate", "--address", engine.address, "--prompt", "x", "--temperature", "0.5",
          "--top-p", "0.9", "--top-k", "7", "--seed", "3", "--max-tokens", "4", "--stop", "END",
          "--stop", "STOP", "--ignore-eos", "--repetition-penalty", "1.2"])  # fmt: skip

    sampling = engine.next_request().sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (sampling.seed, sampling.max_tokens, sampling.ignore_eos) == (3, 4, True)
    assert sampling.repetition_penalty == 1.2


def test_zero_max_tokens_fills_the_context(engine: FakeEngine) -> None:
    main(["generate", "--address", engine.address, "--prompt", "x", "--max-tokens", "0"])

    request = engine.next_request()
    assert request.sampling.max_tokens == engine.info.max_model_len - len(request.prompt)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompt", "x", "--temperature", "9"], "temperature must be"),
        (["--prompt", "x", "--max-tokens", "-1"], "max_tokens must be"),
        (["--prompts-file", "/nowhere/at/all"], "/nowhere/at/all: No such file"),
        (["--prompt", "x", "--system", "y"], "--system needs --chat"),
        (["--prompt", "x" * 5000], "5001 tokens"),
    ],
)
def test_errors_are_one_clear_line(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    code = main(["generate", "--address", engine.address, *arguments])

    error = capsys.readouterr().err
    assert code == 1
    assert error.startswith("stoker: error: ")
    assert error.count("\n") == 1
    assert says in error


def test_without_prompts_the_input_must_have_some(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe(monkeypatch, "\n \n")

    assert main(["generate", "--address", engine.address]) == 1
    assert "there is no prompt" in capsys.readouterr().err


def test_debug_shows_where_an_error_comes_from(engine: FakeEngine) -> None:
    with pytest.raises(ValueError, match="temperature"):
        main(["generate", "--address", engine.address, "--prompt", "x", "--temperature", "9",
              "--debug"])  # fmt: skip


def test_a_refused_batch_fails(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.script = lambda request: [
        Rejection(handle=request.handle, reason="too_long", message="300 blocks of 12")
    ]

    assert main(["generate", "--address", engine.address, "--prompt", "x"]) == 1
    assert "300 blocks of 12" in capsys.readouterr().err


def test_an_answer_that_ended_by_an_error_is_told_and_fails(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.script = lambda request: [
        tokens(
            request.handle,
            [],
            Finish.ERROR,
            ended=(Ended(handle=request.handle, message="a worker died"),),
        )
    ]

    assert main(["generate", "--address", engine.address, "--prompt", "x"]) == 1
    assert "(error: a worker died)" in capsys.readouterr().out


def test_chat_streams_keeps_the_history_and_obeys(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe(monkeypatch, "hi\nho\n/reset\n/what\n/help\nhey\n/exit\nnever\n")

    assert main(["chat", "--address", engine.address, "--max-tokens", "2"]) == 0

    out = capsys.readouterr().out
    assert out.count(" the quick") == 3
    assert "there is no command /what" in out
    prompts = [len(engine.next_request().prompt) for _ in range(3)]
    assert prompts[0] < prompts[1]
    assert prompts[2] < prompts[1]
    assert engine.received.empty()


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from scheduler.sampling import SamplingParams
    from stoker.chat_command import Conversation

    engine.script = lambda request: answer_at_once(request)[:2]  # goes on for ever
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        if "quick" in "".join(written) and " (stopped)" not in written:
            raise KeyboardInterrupt

    with Client(engine.address) as client:
        talk = Conversation(client, SamplingParams(max_tokens=30), None, write)
        assert talk.take("hi")

    assert written[-2:] == [" (stopped)", "\n"]
    assert talk.messages[-1] == {"role": "assistant", "content": " the quick"}


def test_chat_survives_a_message_that_cannot_be_served(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe(monkeypatch, f"{'x' * 500}\nhi\n")

    assert main(["chat", "--address", engine.address, "--max-tokens", "2"]) == 0

    out = capsys.readouterr().out
    assert "the context holds 64" in out
    assert " the quick" in out


def test_status_shows_a_cluster(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--address", engine.address]) == 0

    printed = capsys.readouterr().out
    assert "tiny, serving" in printed
    assert "…" not in printed, "its tables fit into 80 characters"


def test_status_finds_the_clusters_of_this_user(
    engine: FakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("stoker.running.folder_of_user", lambda: tmp_path / "running")

    assert main(["status"]) == 1
    assert "--address" in capsys.readouterr().err
    with announced(engine.address, "tiny"):
        assert main(["status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found[engine.address]["state"] == "serving"


def test_status_of_a_cluster_that_is_not_there_fails_in_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--address", ipc_address(tmp_path), "--timeout", "0.05"]) == 1

    assert "no engine answers" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_traceback(engine: FakeEngine) -> None:
    command = f"{sys.executable} -m stoker.cli generate --address {engine.address}"
    prompts = "--prompt x " * 300
    done = subprocess.run(
        ["/bin/sh", "-c", f"{command} {prompts} --no-stats | head -c 10"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert done.stdout == "[1/300] x\n"
    assert done.stderr == ""
