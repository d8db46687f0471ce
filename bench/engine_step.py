"""The engine process's own work per step: its whole loop, on links without sockets.

Beside what `bench.scheduler_step` measures, this has the loop, the desks, deadlines, metrics and
the sending. Between two waits of the loop, one step is answered and the next one planned.
"""

import time
from collections.abc import Iterator

import numpy as np

from cluster.engine import Engine
from cluster.engine_launch import EngineLaunch
from cluster.engine_main import calm_collector
from cluster.logs import EventLog
from cluster.messages.clients import ClientHello, GenerationDefaults
from cluster.messages.sockets import FromEngine
from cluster.messages.supervisor import Shutdown, SupervisorHello
from cluster.messages.workers import RankCapacity, WorkerHello, WorkerReady
from cluster.wire import FROM_CLIENT, FROM_ENGINE, PROTOCOL_VERSION, TO_ENGINE
from scheduler.arrays import int32
from scheduler.config import SchedulerConfig
from scheduler.plan import StepPlan, StepResult
from scheduler.request import Request

_KEY = "key"
_WORKER, _SUPERVISOR, _CLIENT = b"worker", b"supervisor", b"client"


class Desk:
    """What arrives, and what was sent. Stands in for `cluster.links.server.ServerLink`."""

    def __init__(self) -> None:
        self.num_malformed = 0
        self.arrived: list[tuple[bytes, bytes]] = []
        self.sent: list[bytes] = []

    def receive(self) -> Iterator[tuple[bytes, bytes]]:
        arrived, self.arrived = self.arrived, []
        yield from arrived

    def send(self, peer: bytes, frame: bytes) -> None:
        if peer != _SUPERVISOR:
            self.sent.append(frame)


class LoopClock:
    """Both links and the worker behind them: answers one plan per wait, and takes the time."""

    def __init__(self, requests: list[Request], num_steps: int, seed: int) -> None:
        self.front, self.back = Desk(), Desk()
        self.num_turned_away = 0
        self.seconds: list[float] = []
        """Of each turn of the loop in which a step was answered, all sequences running."""
        self._num_steps, self._num_requests = num_steps, len(requests)
        self._rng = np.random.default_rng(seed)
        self._woken_at: float | None = None
        hello = ClientHello(protocol=PROTOCOL_VERSION)
        self._say(self.front, _CLIENT, FROM_CLIENT.encode(hello))
        self._requests = requests

    def _say(self, desk: Desk, peer: bytes, frame: bytes) -> None:
        desk.arrived.append((peer, frame))

    def start(self, num_blocks: int, max_model_len: int, vocab_size: int) -> None:
        about = {"protocol": PROTOCOL_VERSION, "engine_id": "bench", "key": _KEY}
        capacity = RankCapacity(
            num_blocks=num_blocks,
            block_bytes=1,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
        )
        hello = WorkerHello(group=0, epoch=1, rank=0, capacity=capacity, **about)
        self._say(self.back, _SUPERVISOR, TO_ENGINE.encode(SupervisorHello(**about)))
        self._say(self.back, _WORKER, TO_ENGINE.encode(hello))
        self._say(self.back, _WORKER, TO_ENGINE.encode(WorkerReady()))

    def wait(self, timeout_s: float | None) -> None:
        """Called by the engine between two turns of its loop."""
        now = time.perf_counter()
        if self._woken_at is not None:
            self.seconds.append(now - self._woken_at)
        self._woken_at = None
        self.front.sent.clear()
        for request in self._requests:
            self._say(self.front, _CLIENT, FROM_CLIENT.encode(request))
        self._requests = []
        if self.back.sent and self._answer(FROM_ENGINE.decode(self.back.sent.pop(0))):
            self._woken_at = time.perf_counter()
        if len(self.seconds) >= self._num_steps:
            self._say(self.back, _SUPERVISOR, TO_ENGINE.encode(Shutdown(drain_s=0.0)))

    def _answer(self, message: FromEngine) -> bool:
        """What the worker says; whether this is a step of all sequences."""
        if not isinstance(message, StepPlan):
            return False
        sampled = int(message.samples.sum()) if len(message.samples) else len(message.slot)
        result = StepResult(
            epoch=message.epoch,
            step=message.step,
            token=int32(self._rng.integers(1000, 31000, sampled)),
            compute_s=0.01,
            forward_s=0.008,
        )
        self._say(self.back, _WORKER, TO_ENGINE.encode(result))
        return sampled == self._num_requests


def engine_steps(
    requests: list[Request], vocab_size: int, num_steps: int, seed: int
) -> list[float]:
    """Seconds of the engine's loop per step, while all of the requests run."""
    links = LoopClock(requests, num_steps, seed)
    links.start(num_blocks=100_000, max_model_len=8192, vocab_size=vocab_size)
    launch = EngineLaunch(
        engine_id="bench",
        key=_KEY,
        model="bench",
        model_dir="",
        front_address="",
        back_address="",
        num_groups=1,
        num_ranks=1,
        scheduler=SchedulerConfig(max_num_seqs=len(requests), max_num_batched_tokens=8192),
    )
    engine = Engine(
        launch,
        links,  # type: ignore[arg-type]  # the same methods, no sockets
        tokenizer=None,
        end_ids=(),
        defaults=GenerationDefaults(),
        journal=None,
        signals=list,
        clock=time.monotonic,
        log=EventLog("bench"),
    )
    calm_collector()
    engine.run()
    return links.seconds[:num_steps]
