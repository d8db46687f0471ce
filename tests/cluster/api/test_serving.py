"""`stoker serve` as processes, with scripted workers: HTTP comes up, fails and ends as it should.

Statement 7 of the issue; cases 62, 64, 66, 69, 100, 102, 111, 112, 129 for HTTP.
"""

import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from stoker import Client
from tests.cluster.api.raw import Raw, head
from tests.cluster.api.scripted_serve import write_model
from tests.cluster.api.streams import LONG, WAIT_S, Stream, ports_of, streams, wait_until
from tests.leaks import Footprint
from tests.system.api.serving import Serving
from tests.system.served import settled

SCRIPTED = (sys.executable, "-m", "tests.cluster.api.scripted_serve")


def texts_of(stream: Stream) -> str:
    """All that it said."""
    choices = [event["choices"] for event in stream.events]
    return "".join(one["text"] for each in choices if isinstance(each, list) for one in each)


class Starter:
    """Starts servers in short folders of their own, and checks that nothing of them is left."""

    def __init__(self) -> None:
        self._before = Footprint.now()
        self._all: list[tuple[Serving, Path]] = []

    def __call__(self, *options: str, script: object = None, **fields: object) -> Serving:
        folder = write_model(Path(tempfile.mkdtemp(prefix="stoker-test-")))
        if script is not None:
            (folder / "script.json").write_text(json.dumps({"0": script}))
        settings = ("--max-model-len=256", f"--socket-dir={folder}", *options)
        serving = Serving(folder, *settings, command=SCRIPTED, **fields)  # type: ignore[arg-type]
        self._all.append((serving, folder))
        return serving

    def clear(self) -> None:
        left: list[str] = []
        for serving, folder in self._all:
            with serving:
                pass
            left += [path.name for path in folder.glob("stoker-*")]
            shutil.rmtree(folder)
        assert left == []
        assert self._before.leftovers() == []


@pytest.fixture
def start() -> Iterator[Starter]:
    starter = Starter()
    yield starter
    starter.clear()


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    """Two API servers over a model that takes 20 ms for a token; tests may do with them what
    they recover from by themselves."""
    starter = Starter()
    options = ("--api-servers=2", "--health-timeout-s=1")
    try:
        yield starter(*options, script={"step_s": 0.02}).wait_up()
    finally:
        starter.clear()


def status_of(http: httpx.Client, path: str) -> int:
    return http.get(path).status_code


def test_it_says_where_it_serves_and_is_listed(
    serving: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    from stoker.cli import main

    with serving.http() as http:
        assert status_of(http, "/health") == status_of(http, "/ready") == 200
        assert http.get("/v1/models").json()["data"][0]["id"] == "scripted"
        answer = http.post("/v1/completions", json={**LONG, "max_tokens": 3})
    assert answer.json()["usage"]["completion_tokens"] == 3
    assert main(["status"]) == 0
    printed = capsys.readouterr().out
    assert f"{serving.address}: scripted" in printed
    assert f"HTTP at {serving.base_url}" in printed
    listening = [
        one.laddr.ip
        for process in (psutil.Process(serving.pid), *serving.api_servers, serving.engine)
        for one in process.net_connections("inet")
        if one.status == psutil.CONN_LISTEN
    ]
    assert set(listening) == {"127.0.0.1"}, "case 129: nothing is open to the network unasked"


@pytest.mark.slow
def test_cases_102_and_111_while_the_model_loads_it_lives_and_is_not_ready(
    start: Starter, tmp_path: Path
) -> None:
    serving = start(script={"load_until": str(tmp_path / "loaded")})
    with serving.http() as http:
        assert status_of(http, "/health") == 200
        assert status_of(http, "/ready") == 503
        refused = http.post("/v1/completions", json=LONG)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        (tmp_path / "loaded").touch()
        wait_until(lambda: status_of(http, "/ready") == 200)
        answer = http.post("/v1/completions", json={**LONG, "max_tokens": 2})
        assert answer.status_code == 200, "the first call after that works"
        assert status_of(http, "/health") == 200
    serving.wait_up()


def test_statement_7_a_frozen_engine_is_no_health_and_goes_on_where_it_was(
    serving: Serving,
) -> None:
    with serving.http() as http:
        assert status_of(http, "/health") == 200
        (stream,) = streams(serving, 1, max_tokens=100)
        serving.engine.suspend()
        began = time.monotonic()
        assert status_of(http, "/health") == 503
        assert 1.0 <= time.monotonic() - began < 10.0
        assert status_of(http, "/ready") == 503
        serving.engine.resume()
        wait_until(lambda: status_of(http, "/health") == 200)
        assert status_of(http, "/ready") == 200
    assert stream.end().is_done


def test_statement_7_a_killed_front_end_takes_only_its_own_streams_with_it(
    serving: Serving,
) -> None:
    with Client(serving.address) as client:
        begun = streams(serving, 8)
        victim, other = serving.api_servers
        by_victim = ports_of(victim)
        assert client.status().num_running == 8
        victim.kill()
        with serving.http() as http:  # the other one, since the port is shared
            assert http.post("/v1/completions", json={**LONG, "max_tokens": 2}).status_code == 200
        ends = [stream.end() for stream in begun]
        assert sum(stream.is_done for stream in ends) == 8 - len(by_victim)
        assert all(stream.broke for stream in ends if not stream.is_done)
        settled(client)
        serving.wait_for("api_server_ended")
        wait_until(lambda: len(serving.api_servers) == 2)
        assert other in serving.api_servers
        wait_until(lambda: client.status().num_clients == 3)


def test_a_key_is_one_request_whichever_front_end_it_comes_to(serving: Serving) -> None:
    """Each front end is asked in turn, while the other cannot accept."""
    with Client(serving.address) as client:
        before = client.status().totals.num_requests
        answers: dict[str, set[bytes]] = {key: set() for key in ("a", "b", "c", "d")}
        for frozen in serving.api_servers:
            for key, seen in answers.items():
                seen.add(asked_while_frozen(serving, frozen, key))
        settled(client)
        assert [len(seen) for seen in answers.values()] == [1, 1, 1, 1]
        assert len(set.union(*answers.values())) == 4
        assert client.status().totals.num_requests - before == 4


def asked_while_frozen(serving: Serving, frozen: psutil.Process, key: str) -> bytes:
    """The answer of a front end, which may ask the other one once it moves again."""
    (other,) = [each for each in serving.api_servers if each != frozen]
    body = json.dumps({**LONG, "max_tokens": 3, "temperature": 1}).encode()
    lines = (f"Idempotency-Key: {key}", f"Authorization: Bearer {serving.api_key}")
    frozen.suspend()
    try:
        with Raw(serving.base_url) as raw:
            size = f"Content-Length: {len(body)}"
            raw.send(head("/v1/completions", size, "Content-Type: application/json", *lines) + body)
            port = raw.socket.getsockname()[1]
            wait_until(lambda: port in ports_of(other))
            frozen.resume()
            answer = raw.answer()
    finally:
        frozen.resume()
    assert answer is not None
    assert answer.status == 200, answer.body
    return answer.body


def test_case_112_a_term_signal_lets_streams_end_and_takes_nothing_new(
    start: Starter,
) -> None:
    serving = start(script={"step_s": 0.02}).wait_up()
    begun = streams(serving, 4)
    with serving.http() as http:
        assert status_of(http, "/ready") == 200
        serving.ask_to_end()
        serving.wait_for("engine_stopping")
        wait_until(lambda: status_of(http, "/ready") == 503)
        refused = http.post("/v1/completions", json=LONG)
        assert refused.status_code == 503
        assert refused.headers["connection"] == "close"
        assert refused.json()["error"]["code"] == "shutting_down"
    ends = [stream.end() for stream in begun]

    assert all(stream.is_done for stream in ends)
    assert serving.wait() == 0
    with pytest.raises(ConnectionRefusedError), socket.create_connection(serving.host_and_port):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("how", ["the drain is over", "a second signal"])
def test_case_112_streams_that_take_too_long_end_with_a_clear_error(
    start: Starter, how: str
) -> None:
    drain_s = 0.5 if how == "the drain is over" else 600.0
    serving = start(f"--drain-s={drain_s}", script={"step_s": 0.2}).wait_up()
    begun = streams(serving, 2)
    waiting = httpx_answer(serving)
    serving.ask_to_end()
    serving.wait_for("engine_stopping")
    if how == "a second signal":
        serving.ask_to_end()
    for stream in begun:
        assert stream.end().broke is None
        assert not stream.is_done
        assert stream.error["code"] == "shutting_down"
    whole = waiting()
    assert whole.status_code == 503
    assert whole.json()["error"]["code"] == "shutting_down"
    assert serving.wait() == 0


def httpx_answer(serving: Serving) -> Callable[[], httpx.Response]:
    """A call that is not streamed, on its way; call the result for its answer."""
    found: list[httpx.Response] = []

    def call() -> None:
        with serving.http() as http:
            found.append(http.post("/v1/completions", json=LONG))

    thread = threading.Thread(target=call)
    thread.start()
    with Client(serving.address) as client:
        wait_until(lambda: client.status().num_running + client.status().num_waiting >= 3)

    def answer() -> httpx.Response:
        thread.join(WAIT_S)
        return found[0]

    return answer


@pytest.mark.slow
def test_an_api_server_that_is_asked_to_end_finishes_its_streams_while_others_serve(
    serving: Serving,
) -> None:
    begun = streams(serving, 4)
    leaver, _ = serving.api_servers
    leaver.send_signal(signal.SIGTERM)
    with serving.http() as http:
        for _ in range(8):
            assert http.post("/v1/completions", json={**LONG, "max_tokens": 1}).status_code == 200
    assert all(stream.end().is_done for stream in begun)
    wait_until(lambda: len(serving.api_servers) == 2 and leaver not in serving.api_servers)


@pytest.mark.slow
def test_streams_go_on_when_the_engine_is_killed_and_meanwhile_it_is_not_ready(
    start: Starter,
) -> None:
    serving = start(script={"step_s": 0.05}).wait_up()
    undisturbed = streams(serving, 1)[0].end()
    begun = streams(serving, 2)
    with serving.http() as http:
        serving.engine.kill()
        wait_until(lambda: http.get("/ready").status_code == 503)
        answer = http.post("/v1/completions", json={**LONG, "max_tokens": 1})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        wait_until(lambda: http.get("/ready").status_code == 200)
    for stream in begun:
        assert stream.end().is_done
        assert texts_of(stream) == texts_of(undisturbed)


@pytest.mark.slow
def test_an_engine_that_is_killed_for_good_is_told_to_streams_and_ends_the_server(
    start: Starter,
) -> None:
    serving = start("--max-engine-restarts=0", script={"step_s": 0.05}).wait_up()
    begun = streams(serving, 2)
    serving.engine.kill()
    for stream in begun:
        assert stream.end().error["code"] == "engine_lost"
    assert serving.wait() == 1


@pytest.mark.slow
def test_case_62_a_killed_worker_is_told_to_streams_and_ends_the_server_if_nothing_restarts(
    start: Starter,
) -> None:
    serving = start("--max-restarts=0", script={"step_s": 0.05}).wait_up()
    begun = streams(serving, 2)
    (worker,) = [p for p in serving.family if "scripted_worker" in " ".join(p.cmdline())]
    began = time.monotonic()
    worker.kill()
    for stream in begun:
        assert stream.end().error["type"] == "server_error"
    assert time.monotonic() - began < 10.0
    assert serving.wait() == 1


@pytest.mark.slow
def test_the_death_of_the_supervisor_ends_everything(start: Starter) -> None:
    serving = start("--api-servers=2", script={"step_s": 0.05}).wait_up()
    (stream,) = streams(serving, 1)
    os.kill(serving.pid, signal.SIGKILL)
    assert stream.end().error["type"] == "server_error"
    assert serving.wait() == -signal.SIGKILL
    shutil.rmtree(next(Path(serving.model).glob("stoker-*")))  # the next start's sweep would


@pytest.mark.slow
@pytest.mark.parametrize("after", ["http_bound", "api_server_started", "api_server_listens"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_case_64_a_signal_while_it_starts_ends_everything_soon(
    start: Starter, after: str, number: signal.Signals
) -> None:
    serving = start(script={"load_s": 30.0})
    serving.wait_for(after)
    serving.ask_to_end(number)
    began = time.monotonic()
    assert serving.wait() == 130
    assert time.monotonic() - began < 15.0


def test_a_port_in_use_is_refused_before_anything_is_started(start: Starter) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        serving = start(f"--port={port}")
        assert serving.wait() == 1
    assert re.search(rf"port {port} of 127\.0\.0\.1 is in use.*--port 0", serving.text)
    assert "engine" not in serving.text


@pytest.mark.slow
def test_case_129_an_open_door_is_warned_about_twice(start: Starter) -> None:
    serving = start("--host=0.0.0.0", keys="", script={"load_s": 30.0})
    warning = serving.wait_for("http_open_to_all")
    assert "WARNING" in warning
    assert "set api_keys" in warning
    serving.wait_for("stoker: warning: everybody who reaches")
    with_key = start("--host=0.0.0.0", keys="some-key", script={"load_s": 30.0})
    with_key.wait_for("api_server_listens")
    assert "http_open_to_all" not in with_key.text


@pytest.mark.slow
def test_without_http_there_is_no_port_and_one_line(start: Starter) -> None:
    serving = start("--no-http")
    assert serving.process.stdout is not None
    address = serving.process.stdout.readline().decode().strip()
    with Client(address) as client:
        assert client.status().state == "serving"
    assert serving.api_servers == []
    serving.ask_to_end()
    assert serving.process.stdout.readline() == b""


@pytest.mark.slow
def test_case_69_servers_started_at_once_have_ports_of_their_own(start: Starter) -> None:
    together = [start() for _ in range(4)]
    for serving in together:
        serving.wait_up()
    assert len({serving.base_url for serving in together}) == 4
    assert len({serving.address for serving in together}) == 4


@pytest.mark.slow
def test_an_idle_server_uses_next_to_no_cpu(start: Starter) -> None:
    serving = start("--api-servers=2").wait_up()
    with serving.http() as http:
        http.post("/v1/completions", json={**LONG, "max_tokens": 2})
    family = [psutil.Process(serving.pid), *serving.family]

    def cpu_s() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in family)

    began, before = time.monotonic(), cpu_s()
    with pytest.raises(psutil.TimeoutExpired):
        family[0].wait(10.0)
    assert cpu_s() - before < 0.05 * (time.monotonic() - began), "case 134"


def test_a_call_is_cancelled_by_its_id_by_whichever_process(serving: Serving) -> None:
    with serving.http() as http, Client(serving.address) as client:
        for path in ("/v1/completions", "/v1/chat/completions"):
            for stream in (False, True):
                check_cancelled(serving, http, client, path, stream)


def check_cancelled(
    serving: Serving, http: httpx.Client, client: Client, path: str, stream: bool
) -> None:
    messages = [{"role": "user", "content": "a"}]
    asked = {"messages": messages} if "chat" in path else {"prompt": [5]}
    body = json.dumps({**asked, "max_tokens": 200, "ignore_eos": True, "stream": stream}).encode()
    with Raw(serving.base_url) as raw:
        headers = [
            f"Authorization: Bearer {serving.api_key}",
            "Content-Type: application/json",
            "X-Request-Id: mine-1",
            f"Content-Length: {len(body)}",
        ]
        raw.send(head(path, *headers) + body)
        wait_until(lambda: client.status().num_running == 1)
        cancelled = http.post("/v1/requests/mine-1/cancel")
        assert cancelled.json()["cancelled"] is True
        if stream:
            raw.socket.settimeout(WAIT_S)
            assert b"request_cancelled" in raw.read_until(b"request_cancelled")
        else:
            answer = raw.answer()
            assert answer is not None
            assert answer.status == 499
            assert answer.error()["code"] == "request_cancelled"
    settled(client)
    assert http.post("/v1/requests/mine-1/cancel").status_code == 404


ASKS: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": [5], "max_tokens": 200},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 200,
    },
    "/v1/responses": {"input": "a", "max_output_tokens": 200},
}


@pytest.mark.parametrize("path", ASKS)
def test_a_client_that_leaves_ends_its_call_whatever_it_asked_and_however_it_leaves(
    serving: Serving, path: str
) -> None:
    """Also one that has sent its next request already, which uvicorn alone would not notice."""
    with Client(serving.address) as client:
        ways = [
            (stream, count, how)
            for stream in (False, True)
            for count in (1, 2)
            for how in ("close", "reset", "half")
        ]
        before = client.status().totals.finished
        for stream, count, how in ways:
            body = json.dumps({**ASKS[path], "stream": stream, "ignore_eos": True}).encode()
            headers = [
                f"Authorization: Bearer {serving.api_key}",
                "Content-Type: application/json",
                f"Content-Length: {len(body)}",
            ]
            with Raw(serving.base_url) as raw:
                raw.send((head(path, *headers) + body) * count)
                wait_until(lambda: client.status().num_running == 1)
                if how == "reset":
                    raw.reset()
                elif how == "half":
                    raw.socket.shutdown(socket.SHUT_WR)
                    settled(client)
            settled(client)
        after = client.status().totals.finished
    assert after["abort"] - before.get("abort", 0) == len(ways)
    assert after.get("length", 0) == before.get("length", 0), "none ran to its end"
