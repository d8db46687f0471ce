"""How long a recovery takes, by phase, with warm and with cold weights; and what it costs to be
ready for one when nothing fails.

Recoveries: one group of two ranks computes some streams, and one of its ranks is killed, again and
again. Phases are those of the engine's own `group_recovered` (`cluster.recovery.PHASES`). The cost:
the same work with every precaution and with none, in turn, by its throughput and by the processor
time of all processes, which other work on the machine hardly changes.
"""

import argparse
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from bench.chaos.cluster import Served
from cluster.messages.faults import Fault, InjectFault
from cluster.models import resolve_model
from cluster.recovery import PHASES
from stoker import Client, SamplingParams
from stoker.chaos.link import ChaosLink
from stoker.chaos.orders import Order
from stoker.chaos.storm import FaultReport, Storm
from stoker.chaos.watch import ClusterWatch

SIZES = ("--tensor-parallel-size", "2", "--num-kv-blocks", "256", "--max-model-len", "1024")
READY = (
    *("--max-restarts", "1000000", "--longest-restart-pause-s", "0"),
    *("--poison-after", "0", "--no-workers-s", "3600"),
)
UNREADY = ("--max-restarts", "0", "--no-warm-weights", "--poison-after", "1000000")
PROMPT = list(range(1000, 1200))
MEND_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--kills", type=int, default=10, help="with each kind of weights")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="of each side, for the cost")
    arguments = parser.parse_args()
    model = resolve_model(arguments.model, Path("models"), report=print)
    for name, options in (("warm", ()), ("cold", ("--no-warm-weights",))):
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            with Served(model, log, [*SIZES, *READY, *options]) as served:
                stalls = kill_ranks(served, arguments.kills, arguments.streams)
                print_phases(name, log.read_text(encoding="utf-8"), stalls)
    print_cost(model, arguments.rounds)


def kill_ranks(served: Served, num_kills: int, num_streams: int) -> list[float]:
    """Kill a rank again and again under streams; how long the streams stood each time."""
    has_ended = threading.Event()
    gaps: list[tuple[float, float]] = []
    with Client(served.address) as client:
        threads = [
            threading.Thread(target=_stream, args=(client, seed, has_ended, gaps))
            for seed in range(num_streams)
        ]
        for thread in threads:
            thread.start()
        kills: list[float] = []
        reports: list[FaultReport] = []
        with ChaosLink(served.address) as link, ClusterWatch(served.address) as watch:
            storm = Storm(link, watch, reports.append, watch_s=10.0, mend_s=MEND_S)
            for number in range(num_kills):
                storm.wait_whole()
                storm.pause(4.0)  # for streams to go on, which is when a recovery is over
                kills.append(time.monotonic())
                asked = InjectFault(fault=Fault(kind="kill"), group=0, rank=number % 2)
                storm.let_happen(Order("kill", asked))
                storm.settle()
            storm.pause(2.0)
        has_ended.set()
        for thread in threads:
            thread.join()
    return [
        max((after - before for before, after in gaps if before <= at < after), default=0.0)
        for at in kills
    ]


def _stream(
    client: Client, seed: int, has_ended: threading.Event, gaps: list[tuple[float, float]]
) -> None:
    sampling = SamplingParams(temperature=0.8, seed=seed, max_tokens=500, ignore_eos=True)
    while not has_ended.is_set():
        before = time.monotonic()
        with client.submit({"prompt_token_ids": PROMPT}, sampling) as handle:
            for _ in handle:
                now = time.monotonic()
                gaps.append((before, now))
                before = now
                if has_ended.is_set():
                    break


def print_phases(name: str, log: str, stalls: Sequence[float]) -> None:
    """The median of each phase, in milliseconds."""
    lines = [line for line in log.splitlines() if "engine group_recovered" in line]
    print(f"\n{name} weights: {len(lines)} recoveries, milliseconds (median, worst)\n")
    print("| phase | median | worst |\n| --- | ---: | ---: |")
    for phase in PHASES:
        found = [re.search(rf"\b{phase}_s=([0-9.e+-]+)", line) for line in lines]
        values = [1000 * float(match[1]) for match in found if match]
        if values:
            print(f"| {phase} | {statistics.median(values):.0f} | {max(values):.0f} |")
    values = [1000 * stall for stall in stalls]
    print(f"| a client's stall | {statistics.median(values):.0f} | {max(values):.0f} |")


def print_cost(model: Path, rounds: int) -> None:
    """Throughput and processor time, with every precaution and with none."""
    sides = {"off": UNREADY, "on": ()}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    costs: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, options in sides.items():
            rate, cost = measure(model, options)
            rates[name].append(rate)
            costs[name].append(cost)
    print("\n| precautions | output tokens/s | processor ms per token |\n| --- | ---: | ---: |")
    for name in sides:
        rate, cost = statistics.median(rates[name]), statistics.median(costs[name])
        print(f"| {name} | {rate:.1f} | {cost:.3f} |")
    more = statistics.median(costs["on"]) / statistics.median(costs["off"]) - 1
    slower = 1 - statistics.median(rates["on"]) / statistics.median(rates["off"])
    print(f"\nOn costs {100 * slower:.2f}% of throughput, and {100 * more:.2f}% processor time.")


def measure(model: Path, options: Sequence[str]) -> tuple[float, float]:
    """Output tokens per second, and milliseconds of processors per token, of one cluster."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with Served(model, log, [*SIZES, *options], allows_chaos=False) as served:
            work(served, 8)
            began, used = time.monotonic(), _processor_s(served)
            num_tokens = work(served, 32)
            return (
                num_tokens / (time.monotonic() - began),
                1000 * (_processor_s(served) - used) / num_tokens,
            )


def work(served: Served, num_requests: int) -> int:
    """Compute a batch; its output tokens."""
    sampling = SamplingParams(temperature=0.0, max_tokens=96, ignore_eos=True)
    prompts = [{"prompt_token_ids": [1000 + n, *PROMPT[:63]]} for n in range(num_requests)]
    with Client(served.address) as client:
        outputs = client.generate(prompts, sampling)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def _processor_s(served: Served) -> float:
    """That all its processes have used."""
    family = [psutil.Process(served.process.pid)]
    family += family[0].children(recursive=True)
    times = [process.cpu_times() for process in family]
    return float(sum(time.user + time.system for time in times))


if __name__ == "__main__":
    main()
