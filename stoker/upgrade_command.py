"""`stoker upgrade`: let a running cluster run the code that is installed now."""

import argparse
import contextlib
import sys
import time

import msgspec

from cluster.frontend.errors import RequestError
from cluster.logs import show_events
from cluster.messages.changes import ClusterUpgraded
from stoker.cli import EXIT_FAILED, EXIT_OK
from stoker.client import Client
from stoker.one_cluster import client_for

LOOK_S = 0.2
"""How often the engine is asked how far it is."""


def add_upgrade_arguments(parser: argparse.ArgumentParser) -> None:
    """How long to wait."""
    parser.add_argument(
        "--wait",
        type=float,
        default=3600.0,
        metavar="X",
        help="seconds to wait until everything is replaced (default: an hour; 0: none)",
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of a sentence")
    parser.add_argument(
        "--timeout", type=float, default=5.0, metavar="X", help="seconds to wait for an answer"
    )


def upgrade(arguments: argparse.Namespace) -> int:
    """Ask the cluster at `--address`, or the only one of this user."""
    show_events("upgrade", "error")  # that the engine goes and comes is what was asked for
    with client_for(arguments, "upgrade") as client:
        before = client.upgrade(only_asks=True, timeout_s=arguments.timeout)
        answer = client.upgrade(timeout_s=arguments.timeout)
        if not answer.refusal:
            answer = _wait(client, answer, before.num_done, arguments)
    is_over = answer.num_done > before.num_done
    if arguments.json:
        print(msgspec.json.encode(answer).decode())
    elif answer.refusal or answer.failure:
        print(f"stoker: {answer.refusal or answer.failure}", file=sys.stderr)
    else:
        print("every process runs what is installed now" if is_over else f"phase {answer.phase}")
    has_failed = answer.refusal or answer.failure or (arguments.wait and not is_over)
    return EXIT_FAILED if has_failed else EXIT_OK


def _wait(
    client: Client, answer: ClusterUpgraded, num_before: int, arguments: argparse.Namespace
) -> ClusterUpgraded:
    deadline = time.monotonic() + arguments.wait
    while answer.num_done == num_before and time.monotonic() < deadline:
        time.sleep(LOOK_S)
        with contextlib.suppress(RequestError):  # between one engine and the next
            answer = client.upgrade(only_asks=True, timeout_s=arguments.timeout)
    return answer
