"""Stoker over HTTP: `stoker serve`, asked by `stoker bench serve` with 32 streams at once."""

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from bench.peers.driver import Asked, Ran, answer_runs, own_stdout
from bench.peers.stoker_driver import settings_of

STREAMS = 32
STOKER = (sys.executable, "-m", "stoker.cli")


def serve_command(model: str, words: list[str]) -> list[str]:
    """`stoker serve` with settings given as NAME=VALUE, at any free port."""
    command = [*STOKER, "serve", model, "--port", "0"]
    for name, value in settings_of(words).items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{option}" if value else f"--no-{option}")
        else:
            command += [f"--{option}", str(value)]
    return command


def replay(base_url: str, requests: list[Asked]) -> Ran:
    """The figures of one `stoker bench serve`, its own start left out."""
    with tempfile.TemporaryDirectory() as folder:
        trace, report = Path(folder, "trace.json"), Path(folder, "report.json")
        trace.write_text(
            json.dumps(
                [{"prompt_token_ids": a.prompt, "max_tokens": a.max_tokens} for a in requests]
            )
        )
        subprocess.run(
            [
                *(*STOKER, "bench", "serve", "--base-url", base_url, "--trace", str(trace)),
                *("--max-concurrency", str(STREAMS), "--num-warmups", "0", "--expect-cache"),
                *("--temperature", "0", "--ignore-eos", "--no-progress", "--json", str(report)),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        figures = json.loads(report.read_text())["runs"][0]["figures"]
    wanted = sum(asked.max_tokens for asked in requests)
    assert figures["output_tokens"] == wanted, f"{figures['output_tokens']} tokens, not {wanted}"
    return Ran(
        seconds=figures["duration_s"],
        output_tokens=wanted,
        ttft_s=figures["ttft_ms"]["p50"] / 1e3,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE")
    args = parser.parse_args()
    out = own_stdout()
    server = subprocess.Popen(
        serve_command(args.model, args.settings), stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    try:
        server.stdout.readline()  # the address for clients of our own
        base_url = server.stdout.readline().strip()
        if not base_url:
            raise SystemExit(f"stoker serve ended with {server.wait()}")
        replay(base_url, [Asked([1000, 1001], 1)])
        answer_runs(
            out,
            lambda requests: replay(base_url, requests),
            f"stoker {version('stoker')}",
        )
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
