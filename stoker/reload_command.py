"""`stoker reload`: other weights for a running cluster, group by group."""

import argparse
import sys
import time

import msgspec

from cluster.messages.changes import ModelReloaded
from stoker.cli import EXIT_FAILED, EXIT_OK
from stoker.client import Client
from stoker.one_cluster import client_for

LOOK_S = 0.2
"""How often the engine is asked how far it is."""


def add_reload_arguments(parser: argparse.ArgumentParser) -> None:
    """Which weights, and how long to wait."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default="",
        help="folder on the engine's host, or a name in its models directory; default: what is in "
        "the same folder now",
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=3600.0,
        metavar="X",
        help="seconds to wait until all groups are back (default: an hour; 0: none)",
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of sentences")
    parser.add_argument(
        "--timeout", type=float, default=5.0, metavar="X", help="seconds to wait for an answer"
    )


def reload(arguments: argparse.Namespace) -> int:
    """Ask the cluster at `--address`, or the only one of this user."""
    with client_for(arguments, "reload") as client:
        answer = client.reload(arguments.model, timeout_s=arguments.timeout)
        if not answer.refusal:
            answer = _wait(client, answer, arguments)
    if arguments.json:
        print(msgspec.json.encode(answer).decode())
    elif answer.refusal or answer.failure:
        print(f"stoker: {answer.refusal or _failure(answer)}", file=sys.stderr)
    else:
        print(_sentence(answer))
    has_failed = answer.refusal or answer.failure or (arguments.wait and answer.is_running)
    return EXIT_FAILED if has_failed else EXIT_OK


def _wait(client: Client, answer: ModelReloaded, arguments: argparse.Namespace) -> ModelReloaded:
    deadline = time.monotonic() + arguments.wait
    while answer.is_running and time.monotonic() < deadline:
        time.sleep(LOOK_S)
        answer = client.reload(only_asks=True, timeout_s=arguments.timeout)
    return answer


def _failure(answer: ModelReloaded) -> str:
    back = "go back" if answer.is_running else "have gone back"
    return f"given up; the groups {back} to {answer.model_dir}: {answer.failure}"


def _sentence(answer: ModelReloaded) -> str:
    if answer.is_running:
        return f"{answer.num_done} of {answer.num_groups} groups are back from {answer.model_dir}"
    return f"every group has the weights of {answer.model_dir}"
