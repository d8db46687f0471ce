"""How long a step is on the way: its plan out to every rank, its result back, by kind of link.

Both ends are processes of their own, with the engine's and the workers' real links, and messages of
a steady decode of 256 sequences; the ranks compute nothing. Encoding and decoding count. Between
two network namespaces (a veth pair through a bridge) it is measured where they can be made: as
root.

    python -m bench.dispatch
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from bench.report import header, percentile, table
from cluster.errors import LinkLost
from cluster.keys import ClientKeys, SocketKeys
from cluster.links.dealer import DealerLink
from cluster.links.engine_links import EngineLinks
from cluster.links.sockets import LinkLimits, fresh_keys
from cluster.wire import FROM_ENGINE, TO_ENGINE
from scheduler.arrays import int32
from scheduler.plan import StepPlan, StepResult

NUM_SEQUENCES = 256
LIMITS = LinkLimits(max_message_bytes=64 << 20)
WARM_UP = 200


@dataclass(frozen=True, slots=True)
class Way:
    """One kind of link."""

    name: str
    address: str
    is_encrypted: bool = False
    engine: Callable[[list[str]], list[str]] = list
    """Puts the command of the engine's end where it must run."""
    worker: Callable[[list[str]], list[str]] = list


def plan_of(step: int) -> StepPlan:
    rows = np.arange(NUM_SEQUENCES, dtype="<i4")
    return StepPlan(epoch=1, step=step, slot=rows, start=rows + step)


def run_engine(address: str, keys: SocketKeys | None, num_ranks: int, num_steps: int) -> None:
    """Print seconds per step, one a line, and last the processor's seconds of all of them."""
    with tempfile.TemporaryDirectory(prefix="stoker-") as folder:
        links = EngineLinks(
            f"ipc://{folder}/front",
            address,
            front_limits=LIMITS,
            back_limits=LIMITS,
            back_keys=None if keys is None else keys.server,
        )
        print(links.back.address, flush=True)
        peers: dict[bytes, None] = {}
        while len(peers) < num_ranks:
            links.wait(None)
            peers |= dict.fromkeys(peer for peer, frame in links.back.receive() if frame)
        took = []
        for step in range(1, WARM_UP + num_steps + 1):
            if step == WARM_UP + 1:
                busy_s = time.process_time()
            began = time.perf_counter()
            frame = FROM_ENGINE.encode(plan_of(step))
            for peer in peers:
                links.back.send(peer, frame)
            answer = None
            while answer is None:
                links.wait(None)
                answer = next((found for _, found in links.back.receive()), None)
            TO_ENGINE.decode(answer)
            took.append(time.perf_counter() - began)
        busy_s = time.process_time() - busy_s
        print(msgspec.json.encode([*took[WARM_UP:], busy_s]).decode(), flush=True)
        links.close(linger_s=0.0)


def run_worker(address: str, keys: ClientKeys | None, rank: int) -> None:
    """Say hello, then answer every plan at once, if the rank is the one that answers."""
    token = int32(np.arange(NUM_SEQUENCES))
    with DealerLink(address, LIMITS, keys) as link, contextlib.suppress(LinkLost):
        link.wait_connected(20.0)
        link.send(b"hello")
        while True:
            plan = FROM_ENGINE.decode(link.receive(None) or b"")
            assert isinstance(plan, StepPlan)
            if rank == 0:
                result = StepResult(epoch=1, step=plan.step, token=token, compute_s=0.01)
                link.send(TO_ENGINE.encode(result))


def measured(way: Way, num_ranks: int, num_steps: int) -> tuple[list[float], float]:
    """Seconds of each step, and the engine's processor seconds per step."""
    keys = fresh_keys() if way.is_encrypted else None
    command = [sys.executable, "-m", "bench.dispatch", "--ranks", str(num_ranks)]
    command += ["--steps", str(num_steps), "--keys", msgspec.json.encode(keys).decode()]
    with contextlib.ExitStack() as running:
        engine = running.enter_context(
            subprocess.Popen(
                way.engine([*command, "--engine", way.address]), stdout=subprocess.PIPE, text=True
            )
        )
        running.callback(engine.kill)
        assert engine.stdout is not None
        address = engine.stdout.readline().strip()
        for rank in range(num_ranks):
            worker = subprocess.Popen(
                way.worker([*command, "--worker", address, "--rank", str(rank)])
            )
            running.enter_context(worker)
            running.callback(worker.kill)
        *took, busy_s = msgspec.json.decode(engine.stdout.readline(), type=list[float])
    return took, busy_s / num_steps


@contextlib.contextmanager
def all_ways() -> Iterator[list[Way]]:
    with contextlib.ExitStack() as until_end:
        folder = until_end.enter_context(tempfile.TemporaryDirectory(prefix="stoker-"))
        ways = [
            Way("ipc", f"ipc://{folder}/back"),
            Way("tcp, plain", "tcp://127.0.0.1:0"),
            Way("tcp + CURVE", "tcp://127.0.0.1:0", is_encrypted=True),
        ]
        with contextlib.suppress(ImportError):
            from tests.nodes.rig import Network, can_make_machines

            if can_make_machines():
                one, two = until_end.enter_context(Network(2)).machines
                there = (on_machine(one.pid), on_machine(two.pid))
                address = f"tcp://{one.address}:0"
                ways += [
                    Way("two namespaces, plain", address, False, *there),
                    Way("two namespaces + CURVE", address, True, *there),
                ]
        yield ways


def on_machine(pid: int) -> Callable[[list[str]], list[str]]:
    """Runs a command in the network of a machine of `tests.nodes.rig`."""
    return lambda command: ["nsenter", f"--target={pid}", "--net", *command]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--ranks", type=int, default=0, help="default: 1, then 2")
    parser.add_argument("--rounds", type=int, default=3, help="the ways take turns")
    for end in ("--engine", "--worker", "--keys", "--rank"):  # how it starts its own parts
        parser.add_argument(end, default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    keys = msgspec.json.decode(args.keys or "null", type=SocketKeys | None)
    if args.engine:
        run_engine(args.engine, keys, args.ranks, args.steps)
    elif args.worker:
        run_worker(args.worker, None if keys is None else keys.client, int(args.rank))
    else:
        print(header())
        with all_ways() as ways:
            for num_ranks in [args.ranks] if args.ranks else [1, 2]:
                print(f"\n{num_ranks} ranks, {NUM_SEQUENCES} sequences\n")
                print(compared(ways, num_ranks, args.steps, args.rounds))


def compared(ways: list[Way], num_ranks: int, num_steps: int, num_rounds: int) -> str:
    took: dict[str, list[float]] = {way.name: [] for way in ways}
    busy: dict[str, list[float]] = {way.name: [] for way in ways}
    for _ in range(num_rounds):
        for way in ways:
            seconds, busy_s = measured(way, num_ranks, num_steps // num_rounds)
            took[way.name] += seconds
            busy[way.name].append(busy_s)
    base = percentile(took[ways[0].name], 0.5)
    rows = [
        [
            name,
            f"{1e6 * percentile(seconds, 0.5):.0f}",
            f"{1e6 * percentile(seconds, 0.99):.0f}",
            f"{1e6 * min(busy[name]):.0f}",
            f"{percentile(seconds, 0.5) / base:.2f}",
        ]
        for name, seconds in took.items()
    ]
    return table([["link", "median us", "p99 us", "engine's CPU us", "of ipc"], *rows])


if __name__ == "__main__":
    main()
