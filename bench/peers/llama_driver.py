"""llama.cpp's server, asked over HTTP with token ids, all requests of a trace at once."""

import argparse
import http.client
import json
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bench.peers.driver import HEAD_LEN, Asked, Ran, answer_runs, own_stdout

HOST = "127.0.0.1"
MOST_AT_ONCE = 32
PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one request; times since it was sent."""

    tokens: list[int]
    first_s: float | None
    end_s: float


class LlamaServer:
    """The server as a child process, at a port that was free."""

    def __init__(self, program: str, model: str, threads: int) -> None:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self._port = probe.getsockname()[1]
        self._process = subprocess.Popen(
            [
                *(program, "-m", model, "--host", HOST, "--port", str(self._port)),
                *("--parallel", str(MOST_AT_ONCE), "-c", str(MOST_AT_ONCE * 2048)),
                *("-t", str(threads), "-tb", str(threads), "-b", "2048", "-ub", "512"),
                *("--cache-ram", "0", "--no-webui"),
            ],
            stdin=subprocess.DEVNULL,
        )

    def wait_ready(self) -> None:
        while not self._is_healthy():
            if self._process.poll() is not None:
                raise SystemExit(f"llama-server ended with {self._process.returncode}")
            time.sleep(PAUSE_S)

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def complete(self, asked: Asked, is_streamed: bool) -> Answer:
        body = {
            "prompt": asked.prompt,
            "n_predict": asked.max_tokens,
            "temperature": 0,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": is_streamed,
        }
        connection = http.client.HTTPConnection(HOST, self._port)
        started = time.perf_counter()
        connection.request(
            "POST", "/completion", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        tokens: list[int] = []
        first_s = None
        for line in response:
            said = line.removeprefix(b"data: ").strip()
            if not said:
                continue
            event = json.loads(said)
            if "error" in event:
                raise RuntimeError(f"llama-server: {event['error']}")
            if event.get("tokens") and first_s is None:
                first_s = time.perf_counter() - started
            tokens += event.get("tokens", [])
        end_s = time.perf_counter() - started
        connection.close()
        return Answer(tokens, first_s if is_streamed else None, end_s)

    def replay(self, requests: list[Asked]) -> Ran:
        is_single = len(requests) == 1 and requests[0].max_tokens > 1
        started = time.perf_counter()
        with ThreadPoolExecutor(len(requests)) as pool:
            answers = list(pool.map(lambda asked: self.complete(asked, is_single), requests))
        seconds = time.perf_counter() - started
        made = [len(answer.tokens) for answer in answers]
        wanted = [asked.max_tokens for asked in requests]
        assert made == wanted, f"asked for {wanted} tokens, got {made}"
        first_s = answers[0].first_s if is_single else None
        return Ran(
            seconds=seconds,
            output_tokens=sum(made),
            ttft_s=first_s,
            decode_rate=None if first_s is None else (made[0] - 1) / (answers[0].end_s - first_s),
            heads=[answer.tokens[:HEAD_LEN] for answer in answers],
        )

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program")
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--about", default="llama.cpp")
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    out = own_stdout()
    server = LlamaServer(args.program, args.model, args.threads)
    try:
        server.wait_ready()
        server.replay([Asked([1000, 1001], 1)])
        answer_runs(out, server.replay, args.about)
    finally:
        server.close()


if __name__ == "__main__":
    main()
