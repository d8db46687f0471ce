"""`stoker drain`: take a node of a running cluster out of service, or put it back."""

import argparse
import sys
import time

import msgspec

from cluster.messages.changes import NodeDrained
from stoker.cli import EXIT_FAILED, EXIT_OK
from stoker.client import Client
from stoker.one_cluster import client_for

LOOK_S = 0.2
"""How often the engine is asked whether the node is empty."""


def add_drain_arguments(parser: argparse.ArgumentParser) -> None:
    """Which node, and how long to wait."""
    parser.add_argument(
        "node", metavar="NODE", help="host name, as `stoker status` shows it, or address"
    )
    parser.add_argument("--undo", action="store_true", help="groups may start there again")
    parser.add_argument(
        "--wait",
        type=float,
        default=120.0,
        metavar="X",
        help="seconds to wait until no worker process is left there (default: 120; 0: none)",
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of a sentence")
    parser.add_argument(
        "--timeout", type=float, default=5.0, metavar="X", help="seconds to wait for an answer"
    )


def drain(arguments: argparse.Namespace) -> int:
    """Ask the cluster at `--address`, or the only one of this user."""
    with client_for(arguments, "drain") as client:
        answer = _drained(client, arguments)
    is_over = not answer.refusal and (arguments.undo or not answer.num_leaving)
    if arguments.json:
        print(msgspec.json.encode(answer).decode())
    elif answer.refusal:
        print(f"stoker: {answer.refusal}", file=sys.stderr)
    else:
        print(_sentence(answer, arguments.node, undo=arguments.undo))
    return EXIT_OK if is_over or (not answer.refusal and not arguments.wait) else EXIT_FAILED


def _drained(client: Client, arguments: argparse.Namespace) -> NodeDrained:
    deadline = time.monotonic() + arguments.wait
    while True:
        answer = client.drain(arguments.node, undo=arguments.undo, timeout_s=arguments.timeout)
        if arguments.undo or answer.refusal or not answer.num_leaving:
            return answer
        if time.monotonic() >= deadline:
            return answer
        time.sleep(LOOK_S)


def _sentence(answer: NodeDrained, node: str, *, undo: bool) -> str:
    if undo:
        return f"groups may start on {node} again"
    if not answer.num_leaving:
        return f"{node} is empty, and no group starts there until `stoker drain --undo {node}`"
    groups = "1 group" if answer.num_leaving == 1 else f"{answer.num_leaving} groups"
    why = f": {answer.waits_for}" if answer.waits_for else ""
    return f"{groups} on {node} still{why}"
