"""Streams over HTTP that come one after the other while something is done to the cluster."""

import threading
import time
from dataclasses import dataclass, field

import httpx

from tests.cluster.api.streams import Stream
from tests.system.api.serving import Serving

NUM_READERS = 4

LIMIT_S = 600.0
"""For the streams that run to end, on a machine that does other things too."""

BODIES: tuple[dict[str, object], ...] = (
    {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0},
    {"prompt": "The capital of France is", "max_tokens": 30, "temperature": 0, "logprobs": 1},
    {"prompt": "def main():", "max_tokens": 40, "temperature": 0.9, "seed": 11},
    {"prompt": "My favourite " * 40, "max_tokens": 24, "temperature": 0.7, "seed": 5, "top_p": 0.9},
    {
        "prompt": "A list of animals: ",
        "max_tokens": 32,
        "temperature": 0,
        "presence_penalty": 0.8,
        "frequency_penalty": 0.4,
    },
)


def said(events: list[dict[str, object]]) -> list[tuple[str, object]]:
    """The text and the log-probabilities of a stream, whatever its pieces were."""
    text, tokens, logprobs = "", [], []
    for event in events:
        for choice in event.get("choices", []):  # type: ignore[attr-defined]
            text += choice["text"]
            if rows := choice.get("logprobs"):
                tokens += rows["tokens"]
                logprobs += [round(one, 3) for one in rows["token_logprobs"]]
    return [("text", text), ("tokens", tokens), ("logprobs", logprobs)]


class TimedStream(Stream):
    """One that knows when its events came."""

    def __init__(self, serving: Serving, **body: object) -> None:
        self.times: list[float] = []
        super().__init__(serving, **body)

    def _take(self, line: str) -> None:
        if line.startswith("data: {"):
            self.times.append(time.monotonic())
        super()._take(line)


@dataclass(slots=True)
class Tally:
    """What came of the streams."""

    num_whole: int = 0
    differing: list[object] = field(default_factory=list)
    broken: list[object] = field(default_factory=list)
    refused: list[object] = field(default_factory=list)
    """Ended before they began"""
    gaps_s: list[float] = field(default_factory=list)
    """Between the events of each"""

    def gap(self, share: float) -> float:
        ordered = sorted(self.gaps_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def line(self, what: str) -> str:
        return (
            f"{what}: {self.num_whole} streams whole, {len(self.broken)} dropped, "
            f"{len(self.differing)} different, {len(self.refused)} refused; gaps between tokens "
            f"p50 {self.gap(0.5) * 1e3:.0f} ms, p99 {self.gap(0.99) * 1e3:.0f} ms, "
            f"longest {max(self.gaps_s) * 1e3:.0f} ms"
        )


class Load:
    """Use as a context manager: readers go on from entering to leaving."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._expected = [said(self._one(body).end().events) for body in BODIES]
        self._is_over = threading.Event()
        self._changed = threading.Condition()
        self._num_ended = [0] * NUM_READERS
        self.tally = Tally()
        self._readers = [
            threading.Thread(target=self._read, args=(number,)) for number in range(NUM_READERS)
        ]

    def _one(self, body: dict[str, object]) -> TimedStream:
        return TimedStream(self._serving, ignore_eos=True, **body)

    def _read(self, number: int) -> None:
        kind = number
        while not self._is_over.is_set():
            kind = (kind + 1) % len(BODIES)
            stream = self._one(BODIES[kind])
            stream.join()
            with self._changed:
                self._note(stream, kind)
                self._num_ended[number] += 1
                self._changed.notify_all()

    def _note(self, stream: TimedStream, kind: int) -> None:
        tally = self.tally
        tally.gaps_s += [b - a for a, b in zip(stream.times, stream.times[1:], strict=False)]
        if not stream.times:
            tally.refused.append(repr(stream.broke or stream.events))
        elif not stream.is_done:
            tally.broken.append(repr(stream.broke or stream.events[-1]))
        elif said(stream.events) != self._expected[kind]:
            tally.differing.append((said(stream.events), self._expected[kind]))
        else:
            tally.num_whole += 1

    def so_far(self) -> Tally:
        """What came since the last time that was asked, with the streams that run now."""
        with self._changed:
            wanted = [count + 1 for count in self._num_ended]
            assert self._changed.wait_for(
                lambda: all(a >= b for a, b in zip(self._num_ended, wanted, strict=True)), LIMIT_S
            )
            tally, self.tally = self.tally, Tally()
        return tally

    def __enter__(self) -> "Load":
        for reader in self._readers:
            reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for reader in self._readers:
            reader.join()


def wait_until_over(http: httpx.Client, path: str, limit_s: float) -> dict[str, object]:
    """Ask how far it is until it has come to its end."""
    deadline = time.monotonic() + limit_s
    while True:
        answer = http.get(path).json()
        if not answer.get("is_running") and answer.get("phase", "idle") == "idle":
            return dict(answer)
        assert time.monotonic() < deadline, answer
        time.sleep(0.1)
