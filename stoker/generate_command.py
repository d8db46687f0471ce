"""`stoker generate`: answer prompts through a cluster, print the answers and the figures."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from time import monotonic

from scheduler.errors import InvalidRequest
from scheduler.sampling import SamplingParams
from stoker.cli import EXIT_FAILED, EXIT_OK
from stoker.client import Client, OnAnswer
from stoker.cluster_argument import cluster_of
from stoker.outputs import RequestOutput
from stoker.progress import answers_bar
from stoker.prompts_file import Chat, read_prompts
from stoker.sampling_arguments import sampling_of
from stoker.summary import Summary, summary_of

LONGEST_SHOWN = 240
"""Characters of a prompt that are printed whole."""


def generate(arguments: argparse.Namespace) -> int:
    """Run the command; fails if an answer ended by an error or a timeout."""
    prompts = _prompts_of(arguments)
    sampling_of(arguments, SamplingParams())  # refuses wrong values before anything starts
    with cluster_of(arguments) as client:
        sampling = sampling_of(arguments, client.get_default_sampling_params())
        before, began_s = client.status(), monotonic()
        with answers_bar(len(prompts), is_wanted=arguments.progress) as tell:
            outputs = _answer(client, prompts, sampling, arguments, tell)
        wall_s = monotonic() - began_s
        summary = summary_of(outputs, before, client.status(), wall_s)
    if arguments.json:
        print(_document(prompts, outputs, summary))
    else:
        _print_answers(prompts, outputs)
        if arguments.stats:
            _print_summary(summary)
    is_whole = not summary.outputs_by_finish.keys() & {"error", "timeout", "abort"}
    return EXIT_OK if is_whole else EXIT_FAILED


def _prompts_of(arguments: argparse.Namespace) -> "list[str | Chat]":
    prompts: list[str | Chat] = list(arguments.prompt)
    if arguments.prompts_file is not None:
        prompts += read_prompts(arguments.prompts_file)
    elif not prompts:
        if sys.stdin.isatty():
            raise InvalidRequest(
                "there is no prompt. Give --prompt TEXT or --prompts-file FILE, or pipe prompts "
                "in, one a line"
            )
        prompts = read_prompts("-")
    if not prompts:
        raise InvalidRequest("there is no prompt: the input has no line that is not empty")
    if arguments.system is not None and not arguments.chat:
        raise InvalidRequest("--system needs --chat", param="system")
    return prompts


def _answer(
    client: Client,
    prompts: "Sequence[str | Chat]",
    sampling: SamplingParams,
    arguments: argparse.Namespace,
    tell: OnAnswer,
) -> list[RequestOutput]:
    if not arguments.chat and all(isinstance(prompt, str) for prompt in prompts):
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        return client.generate(texts, sampling, on_answer=tell)
    if not arguments.chat:
        raise InvalidRequest("prompts that are conversations need --chat", param="prompts_file")
    chats = [_chat_of(prompt, arguments.system) for prompt in prompts]
    return client.chat(chats, sampling, on_answer=tell)


def _chat_of(prompt: "str | Chat", system: str | None) -> Chat:
    messages: Chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def _print_answers(prompts: "Sequence[str | Chat]", outputs: Sequence[RequestOutput]) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    count = len(prompts)
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), start=1):
        console.print(f"[{i}/{count}] {_shown(prompt)}", style="bold")
        for completion in output.outputs:
            label = "" if len(output.outputs) == 1 else f"({completion.index + 1}) "
            console.print(f"{label}{completion.text.strip()}")
            if completion.finish_reason not in ("stop", "length"):
                console.print(
                    f"({completion.finish_reason}: {completion.message})", style="bold red"
                )
        console.print()


def _shown(prompt: "str | Chat") -> str:
    """The prompt for people; of a long one, its two ends."""
    text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
    if len(text) <= LONGEST_SHOWN:
        return text
    return f"{text[:120].rstrip()} […] {text[-80:].lstrip()}"


def _print_summary(summary: Summary) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name, value in summary.rows():
        table.add_row(name, value)
    Console(stderr=True, highlight=False).print(table)


def _document(
    prompts: "Sequence[str | Chat]", outputs: Sequence[RequestOutput], summary: Summary
) -> str:
    answers = [
        {"given": prompt, **asdict(output)} for prompt, output in zip(prompts, outputs, strict=True)
    ]
    return json.dumps({"answers": answers, "summary": asdict(summary)}, ensure_ascii=False)
