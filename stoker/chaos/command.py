"""`stoker chaos`: break a test cluster in one place, or at random, and say how it bore that."""

import argparse
import random
import sys
from collections.abc import Callable
from typing import get_args

import msgspec

from cluster.messages.faults import Fault, FaultKind, InjectFault
from scheduler.errors import InvalidRequest
from stoker.chaos.link import ChaosLink
from stoker.chaos.orders import Drawer, Order, Shape
from stoker.chaos.storm import FaultReport, Storm
from stoker.chaos.watch import ClusterWatch
from stoker.cli import EXIT_FAILED, EXIT_OK
from stoker.running import running_clusters

NOTICE_S = 1.0
"""Until the watch has heard of a group that was lost."""


def add_chaos_arguments(parser: argparse.ArgumentParser) -> None:
    """What to break, or how to draw it."""
    parser.add_argument(
        "kind", nargs="?", choices=get_args(FaultKind), help="what goes wrong; or --random"
    )
    where = parser.add_argument_group("where")
    where.add_argument("--group", type=int, default=-1, metavar="N", help="in this group")
    where.add_argument(
        "--rank", type=int, default=-1, metavar="N", help="this rank of it (default: all)"
    )
    where.add_argument("--node", default="", metavar="NAME", help="ranks on this node")
    where.add_argument("--engine", action="store_true", help="the engine core: kill or stop")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--at-step", type=int, default=0, metavar="N", help="when this step begins (default: now)"
    )
    how.add_argument(
        "--after", type=float, default=0.0, metavar="X", help="seconds after that: kill, stop"
    )
    how.add_argument(
        "--seconds",
        type=float,
        default=1.0,
        metavar="X",
        help="how long: stop, slow, delay, full (default: 1)",
    )
    how.add_argument(
        "--count",
        type=int,
        default=1,
        metavar="N",
        help="steps, answers or plans that it befalls; with --random: faults (default: 1)",
    )
    drawn = parser.add_argument_group("at random")
    drawn.add_argument("--random", action="store_true", help="draw faults")
    drawn.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn")
    drawn.add_argument(
        "--pause", type=float, default=1.0, metavar="X", help="most seconds between two faults"
    )
    drawn.add_argument(
        "--kinds", default="", metavar="KINDS", help="only these, separated by commas"
    )
    drawn.add_argument("--but-engine", action="store_true", help="leave the engine core alone")
    parser.add_argument("--json", action="store_true", help="a JSON object per fault")
    parser.add_argument(
        "--watch",
        type=float,
        default=2.0,
        metavar="X",
        help="seconds after its end until which a fault may be noticed (default: 2)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="X",
        help="seconds that the cluster may take to be whole again (default: 120)",
    )


def chaos(arguments: argparse.Namespace) -> int:
    """Break the cluster at `--address`, or the only one of this user; fails if it stays broken."""
    address = arguments.address
    if not address:
        running = [cluster.address for cluster in running_clusters()]
        if len(running) != 1:
            found = ", ".join(sorted(running)) or "none"
            print(
                f"stoker: name the cluster with --address; running for this user: {found}",
                file=sys.stderr,
            )
            return EXIT_FAILED
        (address,) = running
    key_file = arguments.key_file
    is_mended = True

    def report(fault: FaultReport) -> None:
        nonlocal is_mended
        is_mended = is_mended and not fault.is_broken
        print(msgspec.json.encode(fault).decode() if arguments.json else fault.sentence())
        sys.stdout.flush()

    with (
        ChaosLink(address, key_file=key_file) as link,
        ClusterWatch(address, key_file=key_file) as watch,
    ):
        storm = Storm(link, watch, report, watch_s=arguments.watch, mend_s=arguments.timeout)
        if arguments.random:
            at_random(arguments, storm, lambda: watch.shape)
        else:
            storm.let_happen(_order(arguments))
            storm.settle()
    return EXIT_OK if is_mended else EXIT_FAILED


def _order(arguments: argparse.Namespace) -> Order:
    if arguments.kind is None:
        raise InvalidRequest("say what goes wrong, or --random", param="kind")
    if arguments.engine == (arguments.group >= 0 or bool(arguments.node)):
        raise InvalidRequest("say where: --group, --node or --engine", param="group")
    fault = Fault(
        kind=arguments.kind,
        step=arguments.at_step,
        after_s=arguments.after,
        seconds=arguments.seconds,
        count=arguments.count,
    )
    asked = InjectFault(
        fault=fault, group=arguments.group, rank=arguments.rank, node=arguments.node
    )
    return Order(arguments.kind, asked)


def at_random(arguments: argparse.Namespace, storm: Storm, shape_now: Callable[[], Shape]) -> None:
    """Let as many faults happen as were asked for, drawn one by one.

    Raises:
        InvalidRequest: the cluster does not allow it, or there is no such fault.
    """
    kinds = frozenset(arguments.kinds.split(",")) if arguments.kinds else frozenset()
    unknown = sorted(kinds - set(get_args(FaultKind)))
    if unknown:
        raise InvalidRequest(
            f"there are no faults of the kinds {', '.join(unknown)}, only of "
            f"{', '.join(get_args(FaultKind))}",
            param="kinds",
        )
    chance = random.Random(arguments.seed)
    drawer = Drawer(chance, kinds=kinds, with_engine=not arguments.but_engine)
    for _ in range(arguments.count):
        storm.wait_whole()
        storm.pause(chance.uniform(0.0, arguments.pause))
        order = drawer.draw(shape_now())
        if not storm.try_to_let_happen(order):
            # Who is meant has died of the fault before, of which the watch had not heard yet.
            storm.pause(NOTICE_S)
            storm.wait_whole()
            storm.let_happen(order)
    storm.settle()
