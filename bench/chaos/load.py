"""Streams without pause: each caller asks one request after the other and notes what came when."""

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import httpx

from bench.chaos.calls import Call
from stoker import Client, RequestOutput

ANSWER_S = 1200.0
"""Without news for so long, a stream counts as dropped."""

RETRY_S = 0.5
"""Before a call is made again that was sent away at once: while the engine is another one."""


@dataclass(slots=True)
class Answer:
    """What a request was answered with, output by output."""

    call: Call
    tokens: list[list[int]]
    finish: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of all tokens of all outputs, and of the prompt's, in their order"""
    error: str = ""
    """Why the stream was dropped; empty: it was not."""
    at: list[float] = field(default_factory=list)
    """When it began, and then of each piece of any output; monotonic"""
    num_tokens: list[int] = field(default_factory=list)
    """Of each piece"""

    def note(self, index: int, tokens: Sequence[int]) -> None:
        """A piece has come."""
        self.tokens[index] += tokens
        self.at.append(time.monotonic())
        self.num_tokens.append(len(tokens))


class Load:
    """Callers in threads, from `start` to `stop`, who take the calls in turn, again and again."""

    def __init__(
        self,
        address: str,
        http_address: str,
        calls: Sequence[Call],
        *,
        num_callers: int,
        num_http: int,
        think_s: float,
    ) -> None:
        """
        Args:
            num_callers, num_http: streams at a time over the Python client, and over HTTP.
            think_s: between an answer and the next request.
        """
        self._address, self._http_address = address, http_address
        self._think_s = think_s
        self._has_ended = threading.Event()
        self._lock = threading.Lock()
        self.answers: list[Answer] = []
        python = [call for call in calls if not call.is_http]
        http = [call for call in calls if call.is_http]
        self._client = Client(address, label="load")
        self._threads = [
            threading.Thread(target=self._run, args=(calls, ask), name=f"caller-{number}")
            for ask, calls, count in (
                (self._ask, itertools.cycle(python), num_callers),
                (self._ask_http, itertools.cycle(http), num_http),
            )
            for number in range(count)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> list[Answer]:
        """Let what runs come to its end; everything that was answered."""
        self._has_ended.set()
        for thread in self._threads:
            thread.join()
        self._client.close()
        return self.answers

    def once(self, calls: Sequence[Call], num_callers: int) -> list[Answer]:
        """Ask each of these calls once, and no more."""
        todo = iter(calls)
        answers: list[Answer] = []

        def run() -> None:
            while (call := self._next(todo)) is not None:
                answers.append(self._ask_http(call) if call.is_http else self._ask(call))

        threads = [threading.Thread(target=run) for _ in range(num_callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers

    def _run(self, calls: Iterator[Call], ask: Callable[[Call], Answer]) -> None:
        while not self._has_ended.is_set():
            call = self._next(calls)
            assert call is not None
            answer = ask(call)
            with self._lock:
                self.answers.append(answer)
            self._has_ended.wait(self._think_s)

    def _next(self, calls: Iterator[Call]) -> Call | None:
        with self._lock:
            return next(calls, None)

    def _ask(self, call: Call) -> Answer:
        answer = Answer(call, [[] for _ in range(call.sampling.n)], at=[time.monotonic()])
        try:
            handle = self._client.submit({"prompt_token_ids": call.prompt}, call.sampling)
            for piece in handle:
                answer.note(piece.index, piece.token_ids)
            result = handle.result(ANSWER_S)
        except Exception as error:
            answer.error = f"{type(error).__name__}: {error}"
            return answer
        for output in result.outputs:
            if output.finish_reason in ("abort", "error", "timeout"):
                answer.error = f"{output.finish_reason}: {output.message}"
        answer.finish = [str(output.finish_reason) for output in result.outputs]
        answer.text = [output.text for output in result.outputs]
        answer.logprobs = list(_logprobs_of(result))
        return answer

    def _ask_http(self, call: Call) -> Answer:
        answer = Answer(call, [[] for _ in range(call.sampling.n)], at=[time.monotonic()])
        answer.finish = [""] * call.sampling.n
        answer.text = [""] * call.sampling.n
        url = f"{self._http_address}/v1/completions"
        try:
            while not _was_answered(url, call, answer):
                time.sleep(RETRY_S)
                answer.at = [time.monotonic()]
        except httpx.HTTPError as error:
            answer.error = f"{type(error).__name__}: {error}"
        if not answer.error and not all(answer.finish):
            answer.error = "the stream ended before its end"
        return answer


def _was_answered(url: str, call: Call, answer: Answer) -> bool:
    """Make a call; False if it should be made again later, as any client would."""
    with httpx.stream("POST", url, json=_body_of(call), timeout=ANSWER_S) as response:
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            return False
        if response.status_code != httpx.codes.OK:
            answer.error = f"HTTP {response.status_code}: {response.read().decode()}"
            return True
        for line in response.iter_lines():
            _take_line(line, answer)
    return True


def _body_of(call: Call) -> dict[str, object]:
    asked = call.sampling
    body: dict[str, object] = {
        "prompt": call.prompt,
        "stream": True,
        "return_token_ids": True,
        "n": asked.n,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "seed": asked.seed,
        "max_tokens": asked.max_tokens,
        "ignore_eos": asked.ignore_eos,
    }
    if asked.structured_outputs is not None:
        body["structured_outputs"] = {"regex": asked.structured_outputs.regex}
    return body


def _take_line(line: str, answer: Answer) -> None:
    """One line of an event stream."""
    data = line.removeprefix("data: ")
    if data == line or data == "[DONE]":
        return
    event = json.loads(data)
    if "error" in event:
        answer.error = str(event["error"])
    for choice in event.get("choices", ()):
        answer.note(choice["index"], choice.get("token_ids") or [])
        answer.text[choice["index"]] += choice.get("text") or ""
        if choice.get("finish_reason"):
            answer.finish[choice["index"]] = choice["finish_reason"]


def _logprobs_of(result: RequestOutput) -> Iterator[float]:
    for row in result.prompt_logprobs or ():
        yield from (() if row is None else (one.logprob for one in row.values()))
    for output in result.outputs:
        for row in output.logprobs or ():
            yield from (one.logprob for one in row.values())
