"""What a caller may not do to the server or to others: cases 123, 124, 126 and 128."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from stoker import Client
from tests.cluster.api.raw import Raw, head
from tests.system.api.serving import Serving

pytestmark = pytest.mark.model

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class Visitors:
    """A server that nobody should call, and how often somebody did."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/picture.png"
        self.num_visits = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            visitor, _ = self._socket.accept()
            with visitor:
                if visitor.recv(4) == b"stop":
                    return
                self.num_visits += 1

    def close(self) -> None:
        with socket.create_connection(self._socket.getsockname()) as last:
            last.sendall(b"stop")
        self._thread.join()
        self._socket.close()


@pytest.fixture
def visitors() -> Iterator[Visitors]:
    visitors = Visitors()
    yield visitors
    visitors.close()


def test_case_123_no_address_in_a_request_is_ever_opened(
    http: httpx.Client, visitors: Visitors
) -> None:
    url = visitors.url
    parts: list[dict[str, object]] = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "file", "file": {"file_data": url, "file_id": url}},
    ]
    for part in parts:
        for content in ([part], [{"type": "text", "text": "Look:"}, part]):
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
            answer = http.post(CHAT, json=body)
            assert answer.status_code == 400, part
            assert "passwd" not in answer.text
    told = {"messages": [{"role": "user", "content": f"Fetch {url}"}], "max_tokens": 1}
    assert http.post(CHAT, json=told).status_code == 200
    assert visitors.num_visits == 0


class Neighbour(threading.Thread):
    """Somebody whose stream should not suffer: the longest gap between its tokens."""

    def __init__(self, served: Serving) -> None:
        super().__init__()
        self._served = served
        self.longest_gap_s = 0.0
        self.num_chunks = 0
        self.is_running = threading.Event()
        self.may_end = threading.Event()
        self.start()

    def run(self) -> None:
        body = {"prompt": "Once", "stream": True, "max_tokens": 500, "ignore_eos": True}
        with (
            self._served.http() as http,
            http.stream("POST", COMPLETIONS, json={**body, "temperature": 0}) as answer,
        ):
            last = None
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.monotonic()
                if last is not None:
                    self.longest_gap_s = max(self.longest_gap_s, now - last)
                last = now
                self.num_chunks += 1
                if self.num_chunks == 5:
                    self.longest_gap_s = 0.0
                    self.is_running.set()
                if self.may_end.is_set():
                    return


@pytest.fixture
def neighbour(served: Serving) -> Iterator[Neighbour]:
    neighbour = Neighbour(served)
    assert neighbour.is_running.wait(60)
    yield neighbour
    neighbour.may_end.set()
    neighbour.join(60)


def huge_bodies() -> dict[str, bytes]:
    texts = {
        "n": {"prompt": "a", "n": 100_000},
        "best_of": {"prompt": "a", "best_of": 100_000},
        "prompts": {"prompt": ["a"] * 50_000},
        "prompts of ids": {"prompt": [[5]] * 50_000},
        "logprobs": {"prompt": "a", "logprobs": 10_000},
        "logit_bias": {"prompt": "a", "logit_bias": {str(i): 1 for i in range(40_000)}},
        "stop": {"prompt": "a", "stop": [str(i) for i in range(50_000)]},
        "bad_words": {"prompt": "a", "bad_words": [f"w{i}" for i in range(50_000)]},
        "max_tokens beyond all": {"prompt": "a", "max_tokens": 10**30},
        "text": {"prompt": "word " * 400_000, "max_tokens": 1},
    }
    bodies = {name: json.dumps(body).encode() for name, body in texts.items()}
    bodies["depth"] = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    bodies["digits"] = b'{"prompt": "a", "seed": ' + b"9" * 100_000 + b"}"
    return bodies


def test_case_124_what_is_far_too_much_is_refused_soon_and_costs_nobody(
    served: Serving, http: httpx.Client, neighbour: Neighbour
) -> None:
    (server,) = served.api_servers
    before = server.memory_info().rss
    for name, body in huge_bodies().items():
        began = time.monotonic()
        answer = http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, (name, answer.text[:200])
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert time.monotonic() - began < 10.0, name
    assert neighbour.longest_gap_s < 5.0
    assert server.memory_info().rss - before < 256 << 20
    assert server.is_running()


def test_case_126_endless_headers_and_bodies_are_cut_off_while_others_go_on(
    served: Serving, http: httpx.Client, neighbour: Neighbour
) -> None:
    (server,) = served.api_servers
    before = server.memory_info().rss
    most = 100 << 20
    key = f"Authorization: Bearer {served.api_key}"
    starts = {
        "a header": (b"GET / HTTP/1.1\r\nX: ", b"x" * 65536),
        "headers": (b"GET / HTTP/1.1\r\n", b"X-Y: z\r\n" * 1000),
        "a path": (b"GET /", b"x" * 65536),
        "chunks": (
            head(COMPLETIONS, key, "Transfer-Encoding: chunked"),
            b"10000\r\n" + b" " * 65536 + b"\r\n",
        ),
        "chunks without a key": (
            head(COMPLETIONS, "Transfer-Encoding: chunked"),
            b"10000\r\n" + b" " * 65536 + b"\r\n",
        ),
        "a length": (head(COMPLETIONS, key, f"Content-Length: {10 * most}"), b" " * 65536),
    }
    for name, (start, more) in starts.items():
        with Raw(served.base_url) as raw:
            raw.send(start)
            assert raw.send_until_closed(more, most) < most, name
            answer = raw.answer()
            assert answer is None or answer.status in (400, 401, 413, 431), name
        assert http.get("/v1/models").status_code == 200
    assert server.memory_info().rss - before < most
    assert neighbour.longest_gap_s < 5.0


def test_case_128_prefixes_are_shared_only_within_one_salt(http: httpx.Client) -> None:
    prompt = "A secret that nobody else may guess, word for word, of forty tokens or more. " * 3

    def cached(**salt: object) -> int:
        answer = http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1, **salt})
        assert answer.status_code == 200, answer.text
        details = answer.json()["usage"]["prompt_tokens_details"]
        return int((details or {}).get("cached_tokens") or 0)

    assert cached(cache_salt="tenant-1") == 0
    assert cached(cache_salt="tenant-1") > 0
    assert cached(cache_salt="tenant-2") == 0
    assert cached() == 0
    refused = http.post(COMPLETIONS, json={"prompt": prompt, "cache_salt": ""})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "cache_salt"


def connections_of(process: psutil.Process) -> list[Any]:
    """Of a process that may have ended since it was listed."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.net_connections("inet")
    return []


def test_nothing_listens_but_http_and_that_on_loopback(
    served: Serving, engine_client: Client
) -> None:
    assert engine_client.status().state == "serving"
    family = [psutil.Process(served.pid), *served.family]
    listening = {
        one.laddr
        for process in family
        for one in connections_of(process)
        if one.status == psutil.CONN_LISTEN
    }
    assert listening == {served.host_and_port}
