"""Streams in threads of their own, and waiting for what must come to be."""

import json
import threading
import time
from collections.abc import Callable

import httpx
import psutil

from tests.system.api.serving import Serving

WAIT_S = 60.0

LONG: dict[str, object] = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True}


def wait_until(is_so: Callable[[], bool], what: str = "") -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, what or "it never was so"


def ports_of(process: psutil.Process) -> list[int]:
    """Of the calls that it answers."""
    return [
        one.raddr.port
        for one in process.net_connections("tcp")
        if one.status == psutil.CONN_ESTABLISHED
    ]


class Stream(threading.Thread):
    """One stream in a thread of its own, read to its end."""

    def __init__(self, serving: Serving, **body: object) -> None:
        super().__init__()
        self._serving = serving
        self._body = {**LONG, "stream": True, **body}
        self.events: list[dict[str, object]] = []
        self.has_begun = threading.Event()
        self.is_done = False
        """Whether it ended with [DONE]."""
        self.broke: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            with (
                self._serving.http() as http,
                http.stream("POST", "/v1/completions", json=self._body) as answer,
            ):
                for line in answer.iter_lines():
                    self._take(line)
        except httpx.HTTPError as error:
            self.broke = error
        finally:
            self.has_begun.set()

    def _take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.is_done = True
        elif line.startswith("data: "):
            self.events.append(json.loads(line.removeprefix("data: ")))
            self.has_begun.set()

    @property
    def error(self) -> dict[str, object]:
        error = self.events[-1]["error"]
        assert isinstance(error, dict)
        return error

    def end(self) -> "Stream":
        self.join(WAIT_S)
        assert not self.is_alive()
        return self


def streams(serving: Serving, count: int, **body: object) -> list[Stream]:
    """Streams that have begun."""
    begun = [Stream(serving, **body) for _ in range(count)]
    for stream in begun:
        assert stream.has_begun.wait(WAIT_S)
    return begun
