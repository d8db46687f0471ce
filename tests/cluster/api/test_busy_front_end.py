"""A front end with much to do at once: long prompts, many streams, and what a token costs."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import httpx
import pytest

from cluster.frontend.tokenizer_files import files_of
from cluster.messages.sockets import ToClient
from scheduler.arrays import int32
from scheduler.request import Finish, Request, TokenBatch
from tests.cluster.api.conftest import StartRig
from tests.cluster.api.readings import Reading, take_until_each_has
from tests.cluster.api.rig import ApiRig
from tests.cluster.frontend.fake_engine import bytes_column, make_info, tokens

T = TypeVar("T")

NUM_STREAMS = 8
LONG_PROMPT = "the quick brown fox jumps over the lazy dog " * 4600  # 200 kB


class Lockstep:
    """Streams that get a token, all of them, as soon as all readers have the one before."""

    def __init__(self, rig: ApiRig, count: int) -> None:
        self._rig = rig
        self._letter = rig.tokenizer.token_id("a")
        assert self._letter is not None
        self._readings: list[Reading] = []
        self._handles: list[int] = []
        for _ in range(count):
            self._readings.append(Reading(rig.url, max_tokens=100_000))
            self._handles.append(rig.engine.next_request().handle)
        self.num_rounds = 0

    def step(self) -> float:
        """One round; the seconds until everybody has their token."""
        began = time.monotonic()
        self.num_rounds += 1
        self._rig.engine.send(self._batch(Finish.NOT_YET))
        take_until_each_has(self._readings, self.num_rounds, b'"text":"a"')
        return time.monotonic() - began

    def end(self) -> None:
        self._rig.engine.send(self._batch(Finish.LENGTH))
        for reading in self._readings:
            reading.take_all()
            assert reading.text == "a" * (self.num_rounds + 1)
            reading.close()

    def _batch(self, finish: Finish) -> TokenBatch:
        count = len(self._handles)
        return TokenBatch(
            handle=int32(self._handles),
            token=int32([self._letter] * count),
            finish=bytes_column([int(finish)] * count),
        )


@pytest.mark.parametrize(
    "route",
    ["/v1/chat/completions", pytest.param("/v1/completions", marks=pytest.mark.slow)],
)
def test_long_prompts_hold_up_neither_streams_nor_probes(start_rig: StartRig, route: str) -> None:
    """Case 130: 8 prompts of 200 kB while 8 streams run and /health is asked."""
    hold_up_with_long_prompts(start_rig(info=make_info(max_model_len=1 << 20)), route)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_long_prompts_of_a_real_vocabulary_hold_up_nobody_either(
    start_rig: StartRig, smollm2: Path, route: str
) -> None:
    files = files_of(smollm2)
    info = make_info(files, max_model_len=1 << 20, vocab_size=49_152)
    hold_up_with_long_prompts(start_rig(files=files, info=info), route)


def hold_up_with_long_prompts(rig: ApiRig, route: str) -> None:
    streams = Lockstep(rig, NUM_STREAMS)
    body: dict[str, object] = {"prompt": LONG_PROMPT}
    if route == "/v1/chat/completions":
        body = {"messages": [{"role": "user", "content": LONG_PROMPT}]}
    statuses: list[int] = []
    callers = [
        threading.Thread(
            target=lambda: statuses.append(rig.post(route, max_tokens=1, **body).status_code)
        )
        for _ in range(8)
    ]
    began = time.monotonic()
    for caller in callers:
        caller.start()
    gaps: list[float] = []
    num_probes = num_arrived = 0
    while num_arrived < len(callers):
        gaps.append(streams.step())
        assert rig.http.get("/health").status_code == 200
        num_probes += 1
        while not rig.engine.received.empty():
            request = rig.engine.next_request()
            assert len(request.prompt) > 40_000
            rig.engine.send(tokens(request.handle, [1], Finish.LENGTH))
            num_arrived += 1
    took_s = time.monotonic() - began
    for caller in callers:
        caller.join()
    streams.end()

    assert statuses == [200] * len(callers)
    # On the loop, or with Python's lock held, each prompt is one gap, and there are few rounds.
    assert len(gaps) == num_probes > len(callers)
    assert max(gaps) < took_s / 2


def test_long_prompts_of_clients_that_left_are_not_encoded(start_rig: StartRig) -> None:
    rig = start_rig(info=make_info(max_model_len=1 << 20), encode_threads=1)
    pool = rig.api.pool
    on_loop(rig, rig.api.loaded()).result(30)
    may_go_on = threading.Event()
    held = on_loop(rig, pool.run(lambda _: may_go_on.wait(60)))

    async def until_there_are(num_jobs: int) -> None:
        while pool.num_jobs != num_jobs:
            await asyncio.sleep(0.001)

    readings = [Reading(rig.url, prompt=LONG_PROMPT, max_tokens=1) for _ in range(6)]
    on_loop(rig, until_there_are(7)).result(30)
    for reading in readings:
        reading.close()
    on_loop(rig, until_there_are(1)).result(30)
    may_go_on.set()
    held.result(30)
    on_loop(rig, rig.api.engine.status(30.0)).result(30)  # after all that was sent before

    assert rig.engine.received.empty()
    assert rig.api.engine.num_live == 0


def on_loop(rig: ApiRig, work: Coroutine[None, None, T]) -> "Future[T]":
    return asyncio.run_coroutine_threadsafe(work, rig.loop)


def test_prompts_of_one_call_keep_their_order_among_others(start_rig: StartRig) -> None:
    """Long and short ones, encoded on several threads: answers come under the right index."""
    rig = start_rig(info=make_info(max_model_len=1 << 20), encode_threads=3)
    prompts = [LONG_PROMPT[:30_000], "one", LONG_PROMPT[:50_000], "two", "three"]
    answers: list[dict[str, object]] = []
    caller = threading.Thread(
        target=lambda: answers.append(
            rig.post("/v1/completions", prompt=prompts, max_tokens=1, echo=True).json()
        )
    )
    caller.start()
    for _ in prompts:
        request = rig.engine.next_request()
        rig.engine.send(tokens(request.handle, [request.prompt.size], Finish.LENGTH))
    caller.join()

    choices = answers[0]["choices"]
    assert isinstance(choices, list)
    assert [choice["index"] for choice in choices] == list(range(len(prompts)))
    for prompt, choice in zip(prompts, choices, strict=True):
        assert choice["text"].startswith(prompt)


def test_callers_with_mixed_calls_at_once_see_no_failure(start_rig: StartRig) -> None:
    """Case 71: bad words, chats and truncated prompts, encoded by several threads at once."""

    def answer(request: Request) -> list[ToClient]:
        return [tokens(request.handle, [5], Finish.LENGTH)]

    rig = start_rig(encode_threads=4, script=answer)
    one: dict[str, object] = {"max_tokens": 1}
    chat: dict[str, object] = {
        **one,
        "messages": [{"role": "user", "content": "where is <|im_end|> the fox?"}],
    }
    calls: list[tuple[str, dict[str, object]]] = [
        ("/v1/completions", {**one, "prompt": "the fox", "bad_words": ["dog", "lazy"]}),
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", {**chat, "bad_words": ["quick"], "stop": ["over"]}),
        ("/v1/completions", {**one, "prompt": "dog " * 300, "truncate_prompt_tokens": 8}),
        ("/tokenize", {"prompt": "the quick brown fox"}),
    ]
    faults: list[str] = []

    def caller(first: int) -> None:
        with httpx.Client(base_url=rig.url, timeout=60) as http:
            for i in range(first, first + 15):
                path, body = calls[i % len(calls)]
                response = http.post(path, json=body)
                if response.status_code != 200:
                    faults.append(response.text)

    threads = [threading.Thread(target=caller, args=(i,)) for i in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not faults
    assert rig.api.engine.num_live == 0
