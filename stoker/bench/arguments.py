"""Options of `stoker bench`; light, since every start of the command makes all of them."""

import argparse
from collections.abc import Callable, Sequence
from typing import TypeVar

from stoker.bench.lengths import LengthMix

DEFAULT_INPUT = "512"
DEFAULT_OUTPUT = "128"

Value = TypeVar("Value")


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `stoker bench serve`."""
    server = parser.add_argument_group("server")
    server.add_argument(
        "--base-url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="of any server that speaks OpenAI's dialect (default: %(default)s)",
    )
    server.add_argument(
        "--endpoint",
        choices=("completions", "chat"),
        default="completions",
        help="which route to ask (default: %(default)s)",
    )
    server.add_argument("--model", metavar="NAME", help="default: the first that the server lists")
    server.add_argument(
        "--api-key", metavar="KEY", help="default: the first of STOKER_API_KEY, if it is set"
    )
    server.add_argument(
        "--header", action="append", default=[], metavar="'NAME: VALUE'", help="may be repeated"
    )
    workload = _add_workload(parser)
    sources = workload.add_mutually_exclusive_group()
    _add_trace(sources)
    sources.add_argument(
        "--sharegpt", metavar="FILE", help="a JSON list of conversations; the opening is sent"
    )
    sources.add_argument(
        "--prompts-file",
        metavar="FILE",
        help="one prompt a line, or JSON values in a .jsonl file, as of `stoker generate`",
    )
    workload.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="tokens to ask for, with conversations and prompts (default: not sent)",
    )
    workload.add_argument(
        "--random-text",
        action="store_true",
        help="send words instead of token ids, as the chat endpoint always does",
    )
    _add_pace(parser)
    _add_fields(parser)
    _add_judgement(parser)
    _add_output(parser, plots=True)


def add_throughput_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `stoker bench throughput`, beside the model and its settings."""
    _add_trace(_add_workload(parser))
    _add_offline_fields(parser)
    _add_output(parser, plots=False)


def add_latency_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `stoker bench latency`, beside the model and its settings."""
    group = parser.add_argument_group("workload")
    for option, default, text in (
        ("--batch-size", 1, "requests at once"),
        ("--input-len", 32, "tokens of each prompt"),
        ("--output-len", 128, "tokens of each answer"),
        ("--num-iters", 10, "batches that are measured, one after the other"),
        ("--num-iters-warmup", 2, "batches before these that are not"),
    ):
        group.add_argument(
            option,
            type=_count(0 if option == "--num-iters-warmup" else 1),
            default=default,
            metavar="N",
            help=f"{text} (default: %(default)s)",
        )
    _add_seed(group)
    _add_offline_fields(parser)
    _add_output(parser, plots=False)


def _add_workload(parser: argparse.ArgumentParser) -> "argparse._ArgumentGroup":
    group = parser.add_argument_group("workload (without a file: synthetic prompts)")
    group.add_argument(
        "--num-prompts",
        type=_count(1),
        metavar="N",
        help="requests of a run; a file begins again (default: all of a file, or 100)",
    )
    lengths = "128, 64-256, or several with commas, of which each request draws one"
    group.add_argument(
        "--random-input-len",
        type=_told(LengthMix.parse),
        default=DEFAULT_INPUT,
        metavar="LENGTHS",
        help=f"tokens of a synthetic prompt: {lengths} (default: %(default)s)",
    )
    group.add_argument(
        "--random-output-len",
        type=_told(LengthMix.parse),
        default=DEFAULT_OUTPUT,
        metavar="LENGTHS",
        help="max_tokens of a synthetic request, likewise (default: %(default)s)",
    )
    group.add_argument(
        "--random-prefix-len",
        type=_count(0),
        default=0,
        metavar="N",
        help="tokens at the front of synthetic prompts that requests share, for a cache to serve",
    )
    group.add_argument(
        "--random-num-prefixes",
        type=_count(1),
        default=1,
        metavar="N",
        help="how many such fronts there are (default: %(default)s)",
    )
    group.add_argument(
        "--random-token-ids",
        type=_told(_range),
        default="1000-30000",
        metavar="FIRST-LAST",
        help="token ids to draw from (default: %(default)s)",
    )
    group.add_argument(
        "--reuse-prompts",
        action="store_true",
        help="draw the same prompts in each run of one seed; a cache may know them then",
    )
    _add_seed(group)
    return group


def _add_trace(group: "argparse._ActionsContainer") -> None:
    group.add_argument(
        "--trace",
        metavar="FILE",
        help="a JSON list of requests: prompt_token_ids, prompt, messages or prompt_len, and "
        "max_tokens, arrival_s",
    )


def _add_seed(group: "argparse._ActionsContainer") -> None:
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of lengths and arrivals (default: %(default)s)",
    )


def _add_pace(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "pace (without any: a trace's own arrival times, or all at once)"
    )
    group.add_argument(
        "--request-rate", type=_told(_rate), metavar="X", help="requests per second, or inf"
    )
    group.add_argument(
        "--burstiness",
        type=_told(_positive),
        default=1.0,
        metavar="X",
        help="shape of the gamma distribution of gaps; 1: Poisson, less: bursts, more: even",
    )
    group.add_argument(
        "--max-concurrency",
        type=_count(1),
        metavar="N",
        help="most requests under way; without a rate the next goes out when one has ended",
    )
    sweeps = group.add_mutually_exclusive_group()
    sweeps.add_argument(
        "--sweep-rate", type=_told(_list_of(_rate)), metavar="X,X,…", help="a run for each rate"
    )
    sweeps.add_argument(
        "--sweep-concurrency",
        type=_told(_list_of(_whole)),
        metavar="N,N,…",
        help="a run for each number of requests at once",
    )
    group.add_argument(
        "--duration",
        type=_told(_positive),
        metavar="S",
        help="seconds after which no more are sent; those under way are waited for",
    )
    group.add_argument(
        "--timeout",
        type=_told(_positive),
        default=600.0,
        metavar="S",
        help="a request without a whole answer by then has failed (default: %(default)g)",
    )
    group.add_argument(
        "--num-warmups",
        type=_count(0),
        default=0,
        metavar="N",
        help="short requests before each run that are not counted",
    )


def _add_fields(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "what is sent beside prompt and max_tokens (only what is set)"
    )
    _add_sampling(group)
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        default=argparse.SUPPRESS,
        help="go on past the model's end token, so that every answer has the length asked for",
    )
    group.add_argument(
        "--extra-body", metavar="JSON", default="{}", help="an object with any other fields"
    )
    group.add_argument(
        "--cache-salt",
        action="store_true",
        help="a new cache_salt in each run, so that no run finds the prefixes of another",
    )


def _add_offline_fields(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (default: the model's own)")
    _add_sampling(group)
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on past the model's end token, so that every run does the same work "
        "(default: yes)",
    )


def _add_sampling(group: "argparse._ActionsContainer") -> None:
    for option, kind in (("--temperature", float), ("--top-p", float), ("--top-k", int)):
        group.add_argument(
            option, type=kind, metavar="N" if kind is int else "X", default=argparse.SUPPRESS
        )


def _add_judgement(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("judgement")
    group.add_argument(
        "--goodput",
        nargs="+",
        type=_told(_objective),
        default=[],
        metavar="NAME:MS",
        help="count requests that keep all of these: ttft:200 tpot:50 e2el:1000",
    )
    group.add_argument(
        "--max-failures",
        type=float,
        default=0.01,
        metavar="SHARE",
        help="exit with 1 if more of the requests failed or were refused (default: %(default)g)",
    )
    group.add_argument(
        "--expect-cache",
        action="store_true",
        help="a warm prefix cache is meant; do not warn of it",
    )


def _add_output(parser: argparse.ArgumentParser, *, plots: bool) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", metavar="FILE", help="write everything as JSON; - is the output")
    if plots:
        group.add_argument(
            "--detailed", action="store_true", help="with each request in the JSON document"
        )
        group.add_argument(
            "--plot",
            metavar="FILE.png",
            help="of a sweep: throughput against latency; of one run: latencies and a timeline",
        )
    group.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a progress bar, if standard error is a terminal (default: yes)",
    )


def _told(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """`parse` with its own words in the error that argparse shows."""

    def told(text: str) -> Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return told


def _count(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text) if text.lstrip("-").isdigit() else least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return value

    return parse


def _whole(text: str) -> int:
    return _count(1)(text)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(f"{text} is not above 0")
    return value


def _rate(text: str) -> float:
    return float("inf") if text == "inf" else _positive(text)


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
        raise ValueError(f"{text!r} is no range of token ids; write one as 1000-30000")
    return int(first), int(last)


def _list_of(parse: Callable[[str], Value]) -> Callable[[str], Sequence[Value]]:
    return lambda text: [parse(part.strip()) for part in text.split(",")]


def _objective(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in ("ttft", "tpot", "e2el") or not limit:
        raise ValueError(f"{text!r} is no objective; there are ttft:MS, tpot:MS and e2el:MS")
    return name, _positive(limit)
