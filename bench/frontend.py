"""What one API server process carries: streamed tokens per second on one core, and their price.

A scripted engine (no model) sends tokens of N concurrent streams at set rates; the real
application streams them over HTTP, pinned to one core; a reader of raw sockets counts what
comes, on the other core with the engine. Printed per rate: tokens that arrived per second,
CPU of the front end per 1,000 tokens and its share of the core, chunks, and the gaps between
the chunks of a stream, which are those of the engine's steps as long as the front end keeps up.
"""

import argparse
import contextlib
import http.client
import json
import os
import pstats
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.report import ROOT, header, percentile, table
from cluster.api_server_launch import ApiServerLaunch
from cluster.child_process import ChildProcess
from cluster.http_config import HttpConfig
from cluster.listener import Listener

DONE = b"data: [DONE]"
BODIES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "Where is the stoker?"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Where is the stoker?"}]},
}


@dataclass(slots=True)
class Stream:
    """One connection of the reader."""

    connection: socket.socket
    num_chunks: int = 0
    num_bytes: int = 0
    tail: bytes = b""
    arrivals_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one run gave."""

    seconds: float
    num_tokens: int
    num_chunks: int
    num_bytes: int
    cpu_s: float
    gaps_s: list[float]

    def row(self, rate: float) -> list[str]:
        thousands = self.num_tokens / 1000
        return [
            f"{rate:g}",
            f"{self.num_tokens / self.seconds:,.0f}",
            f"{self.cpu_s / thousands * 1e3:.1f}",
            f"{self.cpu_s / self.seconds:.0%}",
            f"{self.num_chunks / self.seconds:,.0f}",
            f"{self.num_tokens / self.num_chunks:.2f}",
            f"{self.num_bytes / self.num_chunks:.0f}",
            *(f"{percentile(self.gaps_s, share) * 1e3:.1f}" for share in (0.5, 0.99, 1.0)),
        ]


HEAD = [
    "steps/s",
    "tokens/s",
    "CPU ms per 1,000",
    "of a core",
    "chunks/s",
    "tokens per chunk",
    "bytes per chunk",
    "gap p50 ms",
    "p99",
    "max",
]


class Processes:
    """A scripted engine and an API server in front of it, each on its own core."""

    def __init__(self, folder: Path, args: argparse.Namespace, rate: float) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self._address = f"ipc://{folder / 'front'}"
        self._profile = folder / "profile" if args.profile else None
        self._listener = Listener("127.0.0.1", 0)
        self.port = self._listener.port
        self._engine = subprocess.Popen(
            [
                *(sys.executable, "-m", "bench.scripted_engine", self._address),
                *("--tokenizer", str(args.tokenizer), "--rate", str(rate)),
                *("--gather", str(args.streams)),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for pid in (0, self._engine.pid):
            os.sched_setaffinity(pid, {cores[-1]})
        assert self._engine.stdout is not None
        if not self._engine.stdout.readline():
            raise SystemExit("the scripted engine did not start")
        self._front = self._start_front()
        self.front = psutil.Process(self._front.pid)
        self.front.cpu_affinity([cores[0]])
        if not self._front.read_line():
            raise SystemExit("the API server did not start")
        self._wait_ready()

    def _wait_ready(self) -> None:
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self.port)
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
            time.sleep(0.05)

    def _start_front(self) -> ChildProcess:
        launch = ApiServerLaunch(
            number=0,
            listen_fd=self._listener.socket.fileno(),
            front_address=self._address,
            http=HttpConfig(),
            drain_s=5.0,
            log_level="warning",
        )
        command = [sys.executable, "-m", "cluster.api.server_main"]
        if self._profile is not None:
            command[1:1] = ["-m", "cProfile", "-o", str(self._profile)]
        return ChildProcess(command, launch, (launch.listen_fd,))

    def end(self, num_lines: int) -> None:
        """End both; print what the engine has to say, and the profile."""
        self._front.ask_to_end()
        self._front.close(timeout_s=30.0)
        self._listener.close()
        self._engine.terminate()
        last, _ = self._engine.communicate(timeout=30)
        print(f"engine: {last.strip()}", file=sys.stderr)
        if self._profile is not None:
            pstats.Stats(str(self._profile)).sort_stats("tottime").print_stats(num_lines)


@contextlib.contextmanager
def running(args: argparse.Namespace, rate: float) -> Iterator[Processes]:
    with tempfile.TemporaryDirectory(prefix="stoker-") as folder:
        processes = Processes(Path(folder), args, rate)
        try:
            yield processes
        finally:
            processes.end(args.profile)


def open_streams(port: int, args: argparse.Namespace) -> list[Stream]:
    fields = {"stream": True, "max_tokens": args.tokens, "ignore_eos": True}
    body = json.dumps(BODIES[args.route] | fields | {"temperature": 0}).encode()
    head = f"POST {args.route} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    streams = []
    for _ in range(args.streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(request)
        connection.setblocking(False)
        streams.append(Stream(connection))
    return streams


def read_all(streams: Sequence[Stream]) -> None:
    """Until each stream has said that it is done."""
    selector = selectors.EpollSelector()
    for stream in streams:
        selector.register(stream.connection, selectors.EVENT_READ, stream)
    num_open = len(streams)
    while num_open:
        for key, _ in selector.select(timeout=30.0):
            stream = key.data
            data = stream.connection.recv(1 << 16)
            if not data:
                raise SystemExit(f"a stream ended early: {stream.tail!r}")
            stream.arrivals_s.append(time.perf_counter())
            stream.num_chunks += data.count(b"data: ")
            stream.num_bytes += len(data)
            stream.tail = (stream.tail + data)[-256:]
            if DONE in stream.tail:
                selector.unregister(stream.connection)
                num_open -= 1
    selector.close()


def measure(processes: Processes, args: argparse.Namespace) -> Figures:
    streams = open_streams(processes.port, args)
    before = sum(processes.front.cpu_times()[:2])
    read_all(streams)
    cpu_s = sum(processes.front.cpu_times()[:2]) - before
    for stream in streams:
        stream.connection.close()
    first = min(stream.arrivals_s[0] for stream in streams)
    last = max(stream.arrivals_s[-1] for stream in streams)
    gaps = [
        later - earlier
        for stream in streams
        for earlier, later in zip(stream.arrivals_s[:-1], stream.arrivals_s[1:], strict=True)
    ]
    return Figures(
        seconds=last - first,
        num_tokens=args.tokens * args.streams,
        num_chunks=sum(stream.num_chunks - 1 for stream in streams),
        num_bytes=sum(stream.num_bytes for stream in streams),
        cpu_s=cpu_s,
        gaps_s=gaps,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=500, help="of each stream")
    parser.add_argument("--rates", type=float, nargs="+", default=[20, 40, 80, 120, 1000])
    parser.add_argument("--route", choices=sorted(BODIES), default="/v1/chat/completions")
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "models/smollm2-135m-instruct")
    parser.add_argument(
        "--profile", type=int, default=0, metavar="LINES", help="profile the front end, slower"
    )
    args = parser.parse_args()
    print(header())
    print(f"\n{args.streams} streams of {args.tokens} tokens on {args.route}\n", flush=True)
    rows = []
    for rate in args.rates:
        with running(args, rate) as processes:
            measure(processes, argparse.Namespace(**{**vars(args), "tokens": 20}))
            rows.append(measure(processes, args).row(rate))
    print(table([HEAD, *rows]))


if __name__ == "__main__":
    main()
