"""Statement 6 for real: a minute of five times what can be done, over HTTP, by the clock.

Workers are scripted, so that a step takes its time without computing, whatever else this
machine does. `tests/scheduler/test_overload.py` proves the same in virtual time, many times over.
"""

import asyncio
import contextlib
import dataclasses
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.cluster.api.scripted_serve import write_model
from tests.system.api.serving import Serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SCRIPTED = (sys.executable, "-m", "tests.cluster.api.scripted_serve")
NUM_PROMPT = 150
PLACES = 8
STEP_S, TOKEN_S = 0.02, 0.002
LOAD_S = 60.0
TICK_S = 0.01
REFUSED_IN_S = 0.1
TURNS = 5
"""Front end, its thread that encodes, engine, front end, caller: what a refusal passes through,
and where it may wait for a core as long as a caller that only slept does."""
CAPACITY = 1.9
"""Calls per second that eight places serve; the test says so itself."""


@dataclasses.dataclass
class Call:
    """One caller, who comes back as told."""

    num_output: int
    prompt: list[int]
    told_s: list[int] = dataclasses.field(default_factory=list)
    refused_s: list[float] = dataclasses.field(default_factory=list)
    """How long each refusal took."""
    first_token_s: float | None = None

    @property
    def body(self) -> dict[str, object]:
        return {
            "prompt": self.prompt,
            "max_tokens": self.num_output,
            "ignore_eos": True,
            "stream": True,
        }


class Callers:
    """Sends calls; those that are refused wait exactly `Retry-After` and come back."""

    def __init__(self, serving: Serving, seed: int) -> None:
        self._rng = random.Random(seed)
        self.calls: list[Call] = []
        self.late_s: list[float] = []
        """How late the callers' own loop was: on shared cores, what is not the server's doing."""
        self._http = httpx.AsyncClient(
            base_url=serving.base_url,
            headers={"Authorization": f"Bearer {serving.api_key}"},
            timeout=60.0,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=200),
        )

    def new_call(self) -> Call:
        prompt = [self._rng.randrange(3, 500) for _ in range(NUM_PROMPT)]
        call = Call(min(200, 20 + int(self._rng.expovariate(1 / 60))), prompt)
        self.calls.append(call)
        return call

    async def make(self, call: Call, until: float) -> None:
        """Until it is answered, or time is up."""
        while True:
            began = time.monotonic()
            async with self._http.stream("POST", "/v1/completions", json=call.body) as answer:
                if answer.status_code == 200:
                    await self._read(answer, call, began)
                    return
                await answer.aread()
            assert answer.status_code == 429, answer.text
            assert answer.json()["error"]["code"] == "queue_full"
            call.refused_s.append(time.monotonic() - began)
            call.told_s.append(int(answer.headers["retry-after"]))
            if time.monotonic() + call.told_s[-1] > until:
                return
            await asyncio.sleep(call.told_s[-1])

    async def _read(self, answer: httpx.Response, call: Call, began: float) -> None:
        async for line in answer.aiter_lines():
            if line.startswith("data: ") and call.first_token_s is None:
                call.first_token_s = time.monotonic() - began

    async def come_at_random(self, rate: float, for_s: float, until: float) -> None:
        end = time.monotonic() + for_s
        ticking = asyncio.create_task(self._tick())
        async with asyncio.TaskGroup() as group:
            while time.monotonic() < end:
                group.create_task(self.make(self.new_call(), until))
                await asyncio.sleep(self._rng.expovariate(rate))
        ticking.cancel()

    async def _tick(self) -> None:
        while True:
            wanted = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self.late_s.append(time.monotonic() - wanted)

    async def post(self, body: dict[str, object]) -> httpx.Response:
        return await self._http.post("/v1/completions", json=body)

    async def close(self) -> None:
        await self._http.aclose()


@contextlib.contextmanager
def scripted(*options: str) -> Iterator[Serving]:
    folder = write_model(Path(tempfile.mkdtemp(prefix="stoker-test-")))
    script = {"step_s": STEP_S, "token_s": TOKEN_S, "num_blocks": 2048, "max_model_len": 1024}
    (folder / "script.json").write_text(json.dumps({"0": script}))
    settings = ("--max-model-len=1024", "--num-kv-blocks=2048", "--log-level=warning")
    with Serving(
        folder, f"--socket-dir={folder}", *settings, *options, command=SCRIPTED
    ) as serving:
        yield serving.wait_up()
    shutil.rmtree(folder)


@pytest.fixture
def serving() -> Iterator[Serving]:
    with scripted(f"--max-num-seqs={PLACES}", "--max-queue-s=0.1") as serving:
        yield serving


@pytest.fixture(scope="module")
def small() -> Iterator[Serving]:
    """Four places, and eight in the queue."""
    with scripted("--max-num-seqs=4", "--max-waiting-requests=8") as serving:
        yield serving


def memory_of(serving: Serving) -> int:
    processes: list[psutil.Process] = [serving.engine, *serving.api_servers]
    return sum(process.memory_info().rss for process in processes)


async def unloaded_s(callers: Callers) -> float:
    """The first token of a call that is alone."""
    for _ in range(6):
        await callers.make(callers.new_call(), time.monotonic())
    return statistics.median(c.first_token_s for c in callers.calls if c.first_token_s)


def test_a_minute_of_five_times_the_load(serving: Serving) -> None:
    async def run() -> tuple[float, Callers]:
        quiet = Callers(serving, seed=1)
        alone_s = await unloaded_s(quiet)
        await quiet.close()
        callers = Callers(serving, seed=2)
        until = time.monotonic() + 2 * LOAD_S
        await callers.come_at_random(5 * CAPACITY, LOAD_S, until)
        await callers.close()
        return alone_s, callers

    before = memory_of(serving)
    alone_s, callers = asyncio.run(run())
    with serving.http() as http:
        metrics = http.get("/metrics").text

    calls = callers.calls
    accepted = [call.first_token_s for call in calls if call.first_token_s is not None]
    refused = statistics.quantiles([s for call in calls for s in call.refused_s], n=100)
    late = statistics.quantiles(callers.late_s, n=100)
    came_back = [c for c in calls if len(c.told_s) + (c.first_token_s is not None) > 1]
    got_in = [c for c in came_back if len(c.told_s) == 1]
    figures = {
        "calls": len(calls),
        "accepted": len(accepted),
        "per second": len(accepted) / (2 * LOAD_S),
        "first token alone": alone_s,
        "first token p50, p90": statistics.quantiles(accepted, n=10)[4::4],
        "refused in p50, p90, p99": [refused[49], refused[89], refused[98]],
        "callers late by p50, p90, p99": [late[49], late[89], late[98]],
        "came back": len(came_back),
        "got in": len(got_in) / len(came_back),
        "told most": max(max(c.told_s, default=0) for c in calls),
        "grown MiB": (memory_of(serving) - before) / 2**20,
    }
    print(figures)
    assert statistics.median(accepted) < 1.5 * alone_s, figures
    assert refused[89] < REFUSED_IN_S + TURNS * late[89], figures
    assert len(got_in) >= 0.9 * len(came_back), figures
    assert len(came_back) > 100, figures
    assert memory_of(serving) - before < 64 << 20, figures
    assert "\nstoker:requests_waiting 0.0\n" in metrics
    assert "\nstoker:requests_running 0.0\n" in metrics


def test_case_81_of_500_calls_at_once_those_that_fit_are_answered_and_the_rest_refused(
    small: Serving,
) -> None:
    async def run() -> list[Call]:
        callers = Callers(small, seed=3)
        async with asyncio.TaskGroup() as group:
            for _ in range(500):
                call = callers.new_call()
                call.num_output = 30
                group.create_task(callers.make(call, until=0.0))
        await callers.close()
        return callers.calls

    calls = asyncio.run(run())
    answered = [call for call in calls if call.first_token_s is not None]

    assert 8 <= len(answered) <= 60  # places become free while so many calls are read
    assert all(call.told_s for call in calls if call.first_token_s is None)
    assert min(told for call in calls for told in call.told_s) >= 1
    with small.http() as http:
        after = http.post("/v1/completions", json={"prompt": [5], "max_tokens": 3})
    assert after.status_code == 200


def test_case_82_a_call_whose_time_is_over_in_the_queue_ends_with_408_and_is_not_begun(
    small: Serving,
) -> None:
    async def run() -> tuple[httpx.Response, float]:
        callers = Callers(small, seed=4)
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                call = callers.new_call()
                call.num_output = 200
                group.create_task(callers.make(call, until=0.0))
            while not all(call.first_token_s for call in callers.calls):
                await asyncio.sleep(0.05)
            began = time.monotonic()
            hopeless = await callers.post({"prompt": [5, 6], "max_tokens": 3, "timeout": 1.0})
            took_s = time.monotonic() - began
        await callers.close()
        return hopeless, took_s

    with small.http() as http:
        answer, took_s = asyncio.run(run())
        metrics = http.get("/metrics").text
    assert answer.status_code == 408
    assert answer.json()["error"]["type"] == "timeout"
    assert 0.9 < took_s < 3.0
    assert 'stoker:requests_finished_total{reason="timeout"} 1.0' in metrics
