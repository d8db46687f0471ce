"""`stoker scale`: how many worker groups a running cluster shall have."""

import argparse
import sys

import msgspec

from cluster.messages.changes import Scaled
from stoker.cli import EXIT_FAILED, EXIT_OK
from stoker.one_cluster import client_for


def add_scale_arguments(parser: argparse.ArgumentParser) -> None:
    """How many, and how to answer."""
    number = parser.add_mutually_exclusive_group(required=True)
    number.add_argument("--groups", type=int, metavar="N", help="so many from now on")
    number.add_argument(
        "--auto", action="store_true", help="as many as load needs, within the cluster's limits"
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of a sentence")
    parser.add_argument(
        "--timeout", type=float, default=5.0, metavar="X", help="seconds to wait for an answer"
    )


def scale(arguments: argparse.Namespace) -> int:
    """Ask the cluster at `--address`, or the only one of this user."""
    with client_for(arguments, "scale") as client:
        answer = client.scale(None if arguments.auto else arguments.groups, arguments.timeout)
    if arguments.json:
        print(msgspec.json.encode(answer).decode())
    elif answer.refusal:
        print(f"stoker: {answer.refusal}", file=sys.stderr)
    else:
        print(_sentence(answer))
    return EXIT_FAILED if answer.refusal else EXIT_OK


def _sentence(answer: Scaled) -> str:
    groups = "1 group" if answer.num_groups == 1 else f"{answer.num_groups} groups"
    if answer.is_automatic:
        return f"load decides from now on; {groups} at this moment"
    return f"{groups} from now on; `stoker status` shows how they come and go"
