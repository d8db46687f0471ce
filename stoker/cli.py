"""The `stoker` command: what can be asked for, and how failures are told.

Each command's own module is loaded when it runs, so that `stoker --help` is quick.
"""

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; returns the exit code."""
    is_debugging = False
    try:
        arguments = make_parser().parse_args(argv)
        is_debugging = arguments.debug
        command: Command = arguments.command
        return command(arguments)
    except KeyboardInterrupt:
        print("stoker: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output left; the interpreter must not complain when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception as error:
        if is_debugging or not _is_expected(error):
            raise
        print(f"stoker: error: {_text_of(error)}", file=sys.stderr)
        return EXIT_FAILED


class _Parser(argparse.ArgumentParser):
    """Tells a mistake in a line; argparse would print all of a command's options before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message}\n`{self.prog} --help` tells more\n")

    def parse_known_args(  # type: ignore[override]  # argparse's own signature has overloads
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuse what is not known in the command where it was given, which knows its options."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            close = difflib.get_close_matches(name, self._option_string_actions, n=1)
            hint = f". Did you mean {close[0]}?" if close else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, []


def make_parser() -> argparse.ArgumentParser:
    """The parser with all commands; importing what they need is left to them."""
    common = _common()
    parser = _Parser(
        prog="stoker",
        description="Serve a large language model from a cluster of tensor-parallel workers.",
    )
    parser.set_defaults(command=lambda _: _show_help(parser), debug=False)
    text = "print the version"
    parser.add_argument(
        "--version", dest="command", action="store_const", const=_version, help=text
    )
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, run, add_to, text in (
        ("generate", _generate, _for_generate, "Answer prompts through a cluster, then end it."),
        ("chat", _chat, _for_chat, "Talk with a model in the terminal."),
        ("serve", _serve, _for_serve, "Bring a cluster up and keep it until SIGINT or SIGTERM."),
        ("up", _up, _for_up, "Bring a cluster up on several machines, from one file."),
        ("down", _down, _for_up, "End what `stoker up` brought up, on every machine."),
        ("status", _status, _for_status, "How a running cluster is."),
        ("scale", _scale, _for_scale, "Change a running cluster's number of groups."),
        ("chaos", _chaos, _for_chaos, "Break a test cluster on purpose, and see it come back."),
        ("drain", _drain, _for_drain, "Take a node of a running cluster out of service."),
        ("reload", _reload, _for_reload, "Give a running cluster other weights, no stream ends."),
        ("upgrade", _upgrade, _for_upgrade, "Let a running cluster run what is installed now."),
        ("plan", _plan, _for_plan, "What of a model fits where; starts nothing."),
        ("doctor", _doctor, _for_doctor, "Examine this host, or the nodes of a Ray cluster."),
        ("fetch", _fetch, _for_fetch, "Bring a model onto this machine."),
        ("version", _version, _for_version, "Print the version."),
    ):
        command = commands.add_parser(name, help=text, description=text, parents=[common])
        command.set_defaults(command=run)
        add_to(command)
    text = "Measure a running server, or a model without one."
    _for_bench(commands.add_parser("bench", help=text, description=text), common)
    return parser


def _common() -> _Parser:
    """Options of every command."""
    common = _Parser(add_help=False)
    common.add_argument(
        "--debug", action="store_true", help="show where an error comes from (traceback)"
    )
    return common


def _for_generate(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_address(parser, "use this running cluster instead of starting one")
    prompts = parser.add_argument_group("prompts (without these: standard input, one a line)")
    prompts.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="may be repeated"
    )
    prompts.add_argument(
        "--prompts-file",
        metavar="FILE",
        help="one prompt a line; in a .jsonl file one JSON value a line: a text, "
        'a list of messages, {"prompt": text} or {"messages": [...]}; - is standard input',
    )
    prompts.add_argument(
        "--chat", action="store_true", help="send each prompt through the chat template"
    )
    prompts.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON document instead of text")
    for option, text in (
        ("--stats", "a table of figures after the answers, on standard error (default: yes)"),
        ("--progress", "a progress bar, if standard error is a terminal (default: yes)"),
    ):
        output.add_argument(option, action=argparse.BooleanOptionalAction, default=True, help=text)
    _add_sampling(parser, max_tokens=256)
    _add_settings(parser)


def _for_chat(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_address(parser, "use this running cluster instead of starting one")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    _add_sampling(parser, max_tokens=1024)
    _add_settings(parser)


def _for_serve(parser: argparse.ArgumentParser) -> None:
    from cluster.config import add_http_arguments

    _add_model(parser)
    add_http_arguments(parser)
    _add_settings(parser)
    _add_ray_address(parser)


def _for_up(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="TOML, like deploy/cluster.toml")


def _for_status(parser: argparse.ArgumentParser) -> None:
    _add_address(parser, "of its front socket; default: the clusters running for this user")
    parser.add_argument("--key-file", metavar="FILE", help="its key file, if it is encrypted")
    parser.add_argument("--json", action="store_true", help="JSON instead of tables")
    parser.add_argument(
        "--timeout", type=float, default=5.0, metavar="X", help="seconds to wait for an answer"
    )


def _for_doctor(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    _add_settings(parser)
    _add_ray_address(parser)


def _for_scale(parser: argparse.ArgumentParser) -> None:
    from stoker.scale_command import add_scale_arguments

    _add_cluster(parser)
    add_scale_arguments(parser)


def _for_chaos(parser: argparse.ArgumentParser) -> None:
    from stoker.chaos.command import add_chaos_arguments

    _add_cluster(parser)
    add_chaos_arguments(parser)


def _for_drain(parser: argparse.ArgumentParser) -> None:
    from stoker.drain_command import add_drain_arguments

    _add_cluster(parser)
    add_drain_arguments(parser)


def _for_reload(parser: argparse.ArgumentParser) -> None:
    from stoker.reload_command import add_reload_arguments

    _add_cluster(parser)
    add_reload_arguments(parser)


def _for_upgrade(parser: argparse.ArgumentParser) -> None:
    from stoker.upgrade_command import add_upgrade_arguments

    _add_cluster(parser)
    add_upgrade_arguments(parser)


def _for_plan(parser: argparse.ArgumentParser) -> None:
    from stoker.plan_command import add_plan_arguments

    _add_model(parser)
    add_plan_arguments(parser)
    _add_settings(parser)


def _for_fetch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=_MODEL)
    parser.add_argument("--models-dir", metavar="DIR", help="where to keep it")


def _for_bench(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(metavar="WHAT", required=True)
    for name, run, add_to, text in (
        ("serve", _bench_serve, _for_bench_serve, "Measure any OpenAI-compatible server."),
        ("throughput", _bench_throughput, _for_bench_throughput, "A whole workload at once."),
        ("latency", _bench_latency, _for_bench_latency, "Batches of one size, one by one."),
    ):
        command = kinds.add_parser(name, help=text, description=text, parents=[common])
        command.set_defaults(command=run)
        add_to(command)


def _for_bench_serve(parser: argparse.ArgumentParser) -> None:
    from stoker.bench.arguments import add_serve_arguments

    add_serve_arguments(parser)
    keys = os.environ.get("STOKER_API_KEY", "")  # a server may have several
    parser.set_defaults(api_key=keys.partition(",")[0].strip() or None)


def _for_bench_throughput(parser: argparse.ArgumentParser) -> None:
    from stoker.bench.arguments import add_throughput_arguments

    _add_model(parser)
    _add_address(parser, "measure this running cluster instead of starting one")
    add_throughput_arguments(parser)
    _add_settings(parser)


def _for_bench_latency(parser: argparse.ArgumentParser) -> None:
    from stoker.bench.arguments import add_latency_arguments

    _add_model(parser)
    _add_address(parser, "measure this running cluster instead of starting one")
    add_latency_arguments(parser)
    _add_settings(parser)


def _for_version(_: argparse.ArgumentParser) -> None:
    pass


_MODEL = "folder with a checkpoint, GGUF file, `smollm2` (a small chat model), or Hugging Face name"


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        default=argparse.SUPPRESS,
        help=f"{_MODEL}; default: smollm2, fetched on first use",
    )


def _add_address(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--address", metavar="ADDRESS", help=f"{text} (tcp://… or ipc://…)")


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    _add_address(parser, "of its front socket; default: the cluster running for this user")
    parser.add_argument("--key-file", metavar="FILE", help="its key file, if it is encrypted")


def _add_ray_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        dest="ray_address",
        metavar="ADDRESS",
        default=argparse.SUPPRESS,
        help="another name of --ray-address: `auto` is the Ray of this machine",
    )


def _add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    from stoker.sampling_arguments import add_sampling_arguments

    add_sampling_arguments(parser, max_tokens=max_tokens)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    from cluster.config import add_arguments

    add_arguments(parser)
    parser.add_argument(
        "--groups",
        "--data-parallel-size",
        dest="num_groups",
        type=int,
        metavar="N",
        default=argparse.SUPPRESS,
        help="other names of --num-groups",
    )


def _is_expected(error: Exception) -> bool:
    """Whether the message alone tells a user what to do; anything else is a fault of ours."""
    from cluster.errors import (
        AddressError,
        BackendError,
        ClusterLost,
        ModelError,
        RemoteError,
        StartFailed,
        StartInterrupted,
    )
    from cluster.frontend.errors import RequestError
    from scheduler.errors import ConfigError, InvalidRequest
    from stoker.bench.errors import BenchError

    kinds = (
        AddressError,
        BackendError,
        BenchError,
        ClusterLost,
        StartFailed,
        StartInterrupted,
        RequestError,
        ModelError,
        ConfigError,
        InvalidRequest,
        OSError,
        RemoteError,
    )
    return isinstance(error, kinds)


def _text_of(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"  # without its number
    return str(error)


def _show_help(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return EXIT_USAGE


def _generate(arguments: argparse.Namespace) -> int:
    from stoker.generate_command import generate

    return generate(arguments)


def _chat(arguments: argparse.Namespace) -> int:
    from stoker.chat_command import chat

    return chat(arguments)


def _serve(arguments: argparse.Namespace) -> int:
    from stoker.serve_command import serve

    return serve(arguments)


def _up(arguments: argparse.Namespace) -> int:
    from stoker.up_command import up

    return up(arguments)


def _down(arguments: argparse.Namespace) -> int:
    from stoker.up_command import down

    return down(arguments)


def _status(arguments: argparse.Namespace) -> int:
    from stoker.status_command import status

    return status(arguments)


def _doctor(arguments: argparse.Namespace) -> int:
    from stoker.doctor_command import doctor

    return doctor(arguments)


def _scale(arguments: argparse.Namespace) -> int:
    from stoker.scale_command import scale

    return scale(arguments)


def _chaos(arguments: argparse.Namespace) -> int:
    from stoker.chaos.command import chaos

    return chaos(arguments)


def _drain(arguments: argparse.Namespace) -> int:
    from stoker.drain_command import drain

    return drain(arguments)


def _reload(arguments: argparse.Namespace) -> int:
    from stoker.reload_command import reload

    return reload(arguments)


def _upgrade(arguments: argparse.Namespace) -> int:
    from stoker.upgrade_command import upgrade

    return upgrade(arguments)


def _plan(arguments: argparse.Namespace) -> int:
    from stoker.plan_command import plan

    return plan(arguments)


def _fetch(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from cluster.config import load_config
    from cluster.models import fetch

    config = load_config(models_dir=arguments.models_dir)
    folder = fetch(
        arguments.model,
        Path(config.models_dir),
        report=lambda text: print(f"stoker: {text}", file=sys.stderr),
    )
    print(folder)
    return EXIT_OK


def _bench_serve(arguments: argparse.Namespace) -> int:
    from stoker.bench.serve_command import bench_serve

    return bench_serve(arguments)


def _bench_throughput(arguments: argparse.Namespace) -> int:
    from stoker.bench.throughput_command import bench_throughput

    return bench_throughput(arguments)


def _bench_latency(arguments: argparse.Namespace) -> int:
    from stoker.bench.latency_command import bench_latency

    return bench_latency(arguments)


def _version(_: argparse.Namespace) -> int:
    from importlib.metadata import version

    print(f"stoker {version('stoker')}")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
