"""How many groups one engine core can drive, by what a step of theirs costs it.

The engine is a real process with real sockets; here are all of its workers and clients, scripted:
each group runs 256 sequences, and answers each plan `--step-ms` after it got it (0: at once, so
that the core is busy all the time). What counts is the core's processor time, its I/O thread
included: per step and per token, and the groups at which a core is full for steps of 10, 20, 50 ms.

    python -m bench.core_scale
"""

import argparse
import contextlib
import heapq
import select
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from bench.report import header, table
from cluster.announcements import EngineListens, read_engine_line
from cluster.child_process import ChildProcess
from cluster.engine_launch import EngineLaunch
from cluster.errors import LinkLost
from cluster.links.dealer import DealerLink
from cluster.links.sockets import LinkLimits
from cluster.messages.clients import ClientHello
from cluster.messages.supervisor import Shutdown, SupervisorHello
from cluster.messages.workers import PoolSize, RankCapacity, WorkerHello, WorkerReady
from cluster.wire import FROM_CLIENT, FROM_ENGINE, PROTOCOL_VERSION, TO_ENGINE
from scheduler.arrays import int32
from scheduler.config import SchedulerConfig
from scheduler.plan import StepPlan, StepResult
from scheduler.request import Request
from scheduler.sampling import SamplingParams

NUM_SEQUENCES = 256
PROMPT_TOKENS = 128
VOCAB_SIZE = 32_000
OUTPUT_TOKENS = 1000
BLOCKS = 20_000
"""Of each group: room for all that its sequences will ever have, so that all of them start."""
MOST_STEPS = 600
"""Measured of each group, so that no sequence ends meanwhile."""
FILL_STEP_S = 0.05
"""A step's time while sequences start, so that the first ones do not end before the last ones."""
LIMITS = LinkLimits(max_message_bytes=64 << 20, queue_messages=100_000)
ABOUT = {"protocol": PROTOCOL_VERSION, "engine_id": "bench", "key": "bench"}
STEP_MS = (10, 20, 50)


class Player:
    """All workers (one rank per group) and all clients of one engine."""

    def __init__(self, listens: EngineListens, num_groups: int, num_clients: int) -> None:
        self.step_s = FILL_STEP_S
        self.num_steps = self.num_tokens = 0
        """Answered, of all groups."""
        self._due: list[tuple[float, int, int, bytes]] = []
        """When each answer is due, the how-manieth it is, its group, and its frame."""
        self._free_at = [0.0] * num_groups
        """When each group has computed all that it was given: one step after the other."""
        self._num_plans = 0
        self._rng = np.random.default_rng(0)
        self._supervisor = DealerLink(listens.back_address, LIMITS)
        self._supervisor.send(TO_ENGINE.encode(SupervisorHello(**ABOUT)))
        self._workers = [DealerLink(listens.back_address, LIMITS) for _ in range(num_groups)]
        self._clients = [DealerLink(listens.front_address, LIMITS) for _ in range(num_clients)]
        self._rows = [0] * num_groups
        """Sequences of each group's last plan."""
        capacity = RankCapacity(
            num_blocks=BLOCKS, block_bytes=1, vocab_size=VOCAB_SIZE, max_model_len=4096
        )
        for group, link in enumerate(self._workers):
            hello = WorkerHello(group=group, epoch=1, rank=0, capacity=capacity, **ABOUT)
            link.send(TO_ENGINE.encode(hello))
        for link in self._clients:
            link.send(FROM_CLIENT.encode(ClientHello(protocol=PROTOCOL_VERSION)))
        self._is_ready = [False] * num_groups
        links = [*self._workers, *self._clients]
        self._by_fd = {fd: link for link in links for fd in link.fds}
        self._group_of = {link: group for group, link in enumerate(self._workers)}
        self._poll = select.poll()
        for fd in self._by_fd:
            self._poll.register(fd, select.POLLIN)
        self._sent_to = set(links)
        """What has come to these may wake nobody: sending to them has used the wake-up up."""

    @property
    def are_ready(self) -> bool:
        return all(self._is_ready)

    @property
    def are_full(self) -> bool:
        return all(rows == NUM_SEQUENCES for rows in self._rows)

    def ask(self, num_requests: int) -> None:
        for handle in range(num_requests):
            request = Request(
                handle=handle,
                prompt=int32(self._rng.integers(0, VOCAB_SIZE, PROMPT_TOKENS)),
                sampling=SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True),
            )
            self._clients[handle % len(self._clients)].send(FROM_CLIENT.encode(request))
        self._sent_to.update(self._clients)

    def turn(self) -> None:
        """Take in what has come, and answer what is due."""
        for link in self._sent_to:
            self._read(link)
        self._sent_to.clear()
        wait_ms = 100.0
        if self._due:
            wait_ms = max(0.0, 1e3 * (self._due[0][0] - time.perf_counter()))
        for link in {self._by_fd[fd] for fd, _ in self._poll.poll(wait_ms)}:
            self._read(link)
        now = time.perf_counter()
        while self._due and self._due[0][0] <= now:
            _, _, group, frame = heapq.heappop(self._due)
            self._workers[group].send(frame)
            self._sent_to.add(self._workers[group])
            self.num_steps += 1

    def _read(self, link: DealerLink) -> None:
        group = self._group_of.get(link)
        while (frame := link.take()) is not None:
            if group is not None:
                self._take(group, frame)

    def _take(self, group: int, frame: bytes) -> None:
        message = FROM_ENGINE.decode(frame)
        if isinstance(message, PoolSize):
            self._workers[group].send(TO_ENGINE.encode(WorkerReady()))
            self._is_ready[group] = True
        elif isinstance(message, StepPlan):
            count = int(message.samples.sum()) if len(message.samples) else len(message.slot)
            self._rows[group] = count
            self.num_tokens += count
            token = int32(self._rng.integers(0, VOCAB_SIZE, count))
            result = StepResult(
                epoch=message.epoch,
                step=message.step,
                token=token,
                compute_s=self.step_s or 0.01,
            )
            self._num_plans += 1
            due = max(time.perf_counter(), self._free_at[group]) + self.step_s
            self._free_at[group] = due
            heapq.heappush(self._due, (due, self._num_plans, group, TO_ENGINE.encode(result)))

    def close(self) -> None:
        with contextlib.suppress(LinkLost):
            self._supervisor.send(TO_ENGINE.encode(Shutdown(drain_s=0.0)))
        for link in [*self._workers, *self._clients]:
            link.close()
        self._supervisor.close(linger_s=1.0)


@contextlib.contextmanager
def engine_of(num_groups: int) -> Iterator[tuple[EngineListens, psutil.Process]]:
    with tempfile.TemporaryDirectory(prefix="stoker-") as folder:
        launch = EngineLaunch(
            engine_id="bench",
            key="bench",
            model="bench",
            model_dir=folder,
            front_address=f"ipc://{folder}/front",
            back_address=f"ipc://{folder}/back",
            num_groups=num_groups,
            num_ranks=1,
            client_queue=100_000,
            scheduler=SchedulerConfig(
                max_num_seqs=NUM_SEQUENCES,
                max_num_batched_tokens=8192,
                max_waiting_requests=1_000_000,
                max_waiting_tokens=10**9,
            ),
            log_level="error",
        )
        child = ChildProcess((sys.executable, "-P", "-m", "cluster.engine_main"), launch)
        try:
            listens = read_engine_line(child.read_line())
            assert isinstance(listens, EngineListens), listens
            yield listens, psutil.Process(child.pid)
        finally:
            child.close(3.0)


def cpu_s(process: psutil.Process) -> float:
    """Of all of its threads, to the nanosecond (Linux, Documentation/scheduler/sched-stats)."""
    tasks = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def measured(
    num_groups: int, num_clients: int, step_s: float, window_s: float
) -> tuple[float, float, float]:
    """The core's processor seconds per step, tokens per step, and its share of a core."""
    with engine_of(num_groups) as (listens, process):
        player = Player(listens, num_groups, num_clients)
        try:
            while not player.are_ready:
                player.turn()
            player.ask(num_groups * NUM_SEQUENCES)
            while not player.are_full:
                player.turn()
            player.step_s = step_s
            began, busy_s = time.perf_counter(), cpu_s(process)
            steps, tokens = player.num_steps, player.num_tokens
            while (
                time.perf_counter() - began < window_s
                and player.num_steps - steps < MOST_STEPS * num_groups
            ):
                player.turn()
            took_s, busy_s = time.perf_counter() - began, cpu_s(process) - busy_s
            steps, tokens = player.num_steps - steps, player.num_tokens - tokens
        finally:
            player.close()
    assert player.are_full, "sequences ended while they were measured"
    return busy_s / steps, tokens / steps, busy_s / took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--clients", type=int, default=4, help="front ends that share the streams")
    parser.add_argument("--step-ms", type=float, default=0.0, help="0: answered at once")
    parser.add_argument("--window-s", type=float, default=4.0)
    args = parser.parse_args()
    print(header())
    print(f"\n{NUM_SEQUENCES} sequences per group, {args.clients} clients, ", end="")
    print(f"plans answered after {args.step_ms:g} ms\n")
    heads = ["groups", "CPU us per step", "CPU us per token", "core busy"]
    rows = [[*heads, *(f"full at {ms} ms" for ms in STEP_MS)]]
    for num_groups in args.groups:
        step_cpu_s, tokens, share = measured(
            num_groups, args.clients, args.step_ms / 1e3, args.window_s
        )
        rows.append(
            [
                str(num_groups),
                f"{1e6 * step_cpu_s:.0f}",
                f"{1e6 * step_cpu_s / tokens:.2f}",
                f"{share:.0%}",
                *(f"{ms / 1e3 / step_cpu_s:.0f} groups" for ms in STEP_MS),
            ]
        )
    print(table(rows))


if __name__ == "__main__":
    main()
