"""How calls end: answered, left by the client, refused by the engine, or broken on the way."""

import json
import socket
import threading
from collections.abc import Iterator

import httpx
import openai
import pytest

from cluster.messages.clients import EngineStarting, EngineStopping
from cluster.messages.sockets import ToClient
from scheduler.request import Abort, Ended, Finish, Rejection, Request
from tests.cluster.api.conftest import StartRig
from tests.cluster.api.rig import ApiRig, spoken
from tests.cluster.frontend.fake_engine import say_nothing, tokens

HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": HI},
}


class Asking:
    """One call on a socket of its own, in the middle of which a test can act."""

    def __init__(self, rig: ApiRig, path: str, **fields: object) -> None:
        body = json.dumps({**BODIES[path], **fields}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        self._socket = socket.create_connection(("127.0.0.1", httpx.URL(rig.url).port or 0), 30)
        self._socket.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.request = rig.engine.next_request()

    def leave(self) -> None:
        self._socket.close()

    def read(self, until: str) -> str:
        """What was answered, up to and with a text that must come."""
        answer = b""
        while until.encode() not in answer:
            part = self._socket.recv(65536)
            assert part, f"the connection ended after {answer!r}"
            answer += part
        return answer.decode()


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiRig]:
    """An engine that answers only what a test has it say."""
    with ApiRig(tmp_path_factory.mktemp("silent"), script=say_nothing) as rig:
        yield rig


@pytest.fixture(scope="module")
def unlucky(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiRig]:
    """An engine with which everything goes wrong, in the way that the seed says."""
    with ApiRig(tmp_path_factory.mktemp("unlucky"), script=go_wrong) as rig:
        yield rig


REJECTIONS = [
    ("invalid", 400, openai.BadRequestError),
    ("too_long", 400, openai.BadRequestError),
    ("queue_full", 429, openai.RateLimitError),
    ("timeout", 408, openai.APIStatusError),
    ("shutting_down", 503, openai.InternalServerError),
    ("no_workers", 503, openai.InternalServerError),
]
ENDS = [
    (Finish.ABORT, 503, "shutting_down"),
    (Finish.TIMEOUT, 408, "request_timeout"),
    (Finish.ERROR, 500, "internal_error"),
]
FIRST_END = 100
"""From this seed on, output 0 ends well and output 1 does not."""


def go_wrong(request: Request) -> list[ToClient]:
    handle, seed = request.handle, request.sampling.seed or 0
    if seed < len(REJECTIONS):
        reason, _, _ = REJECTIONS[seed]
        return [
            Rejection(handle=handle, reason=reason, message="why", param="n", retry_after_s=2.4)
        ]
    index, is_second = divmod(seed - FIRST_END, 2)
    if not is_second:
        return spoken(request, [300, 301])
    end = Ended(handle=handle, message="why")
    return [tokens(handle, [300]), tokens(handle, [302], ENDS[index][0], ended=(end,))]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_client_that_leaves_has_its_request_aborted_at_once(
    silent: ApiRig, path: str, stream: bool, has_begun: bool
) -> None:
    rig = silent
    call = Asking(rig, path, stream=stream, max_tokens=30)
    if has_begun:
        rig.engine.send(tokens(call.request.handle, [300]))
    if has_begun and stream:
        call.read("200 OK")

    call.leave()

    message = rig.engine.received.get(timeout=10)
    assert isinstance(message, Abort)
    assert message.handle.tolist() == [call.request.handle]
    assert rig.http.get("/version").status_code == 200  # later than the end of that call
    assert rig.api.calls == {}


def test_all_requests_of_a_call_are_aborted_when_its_client_leaves(silent: ApiRig) -> None:
    rig = silent
    call = Asking(rig, "/v1/completions", prompt=["a", "b"], n=2)
    others = [rig.engine.next_request() for _ in range(3)]
    call.leave()
    handles: set[int] = set()
    while len(handles) < 4:
        message = rig.engine.received.get(timeout=10)
        assert isinstance(message, Abort)
        handles |= set(message.handle.tolist())
    assert handles == {request.handle for request in (call.request, *others)}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", range(len(REJECTIONS)), ids=lambda seed: REJECTIONS[seed][0])
def test_a_rejection_has_its_status_also_for_a_stream(
    unlucky: ApiRig, seed: int, stream: bool
) -> None:
    _, status, kind = REJECTIONS[seed]
    answer = unlucky.post("/v1/chat/completions", messages=HI, stream=stream, seed=seed)
    assert answer.status_code == status
    assert answer.json()["error"]["message"].endswith("why")
    assert answer.headers.get("retry-after") == (None if status == 400 else "3")
    with pytest.raises(kind):
        unlucky.openai().completions.create(model="tiny", prompt="hi", stream=stream, seed=seed)
    assert unlucky.api.calls == {}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(("finish", "status", "code"), ENDS, ids=lambda value: str(value))
def test_an_answer_that_is_not_whole_is_an_error(
    unlucky: ApiRig, path: str, n: int, finish: Finish, status: int, code: str
) -> None:
    index = [end for end, _, _ in ENDS].index(finish)
    seed = FIRST_END + 2 * index + (n == 1)
    answer = unlucky.post(path, **BODIES[path], n=n, seed=seed)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert answer.json()["error"]["message"].endswith("why")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("finish", "status", "code"), ENDS, ids=lambda value: str(value))
def test_a_stream_that_breaks_ends_with_an_error_and_without_done(
    silent: ApiRig, path: str, finish: Finish, status: int, code: str
) -> None:
    rig = silent

    def speak() -> None:
        request = rig.engine.next_request()
        rig.engine.send(tokens(request.handle, rig.tokenizer.encode(" the quick")[1:]))
        is_begun.wait(30)
        end = Ended(handle=request.handle, message="why")
        rig.engine.send(tokens(request.handle, [], finish, ended=(end,)))

    is_begun = threading.Event()
    speaker = threading.Thread(target=speak)
    speaker.start()
    with rig.http.stream("POST", path, json={**BODIES[path], "stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines: list[str] = []
        for line in answer.iter_lines():
            is_begun.set()
            if line:
                lines.append(line)
    speaker.join()
    error = json.loads(lines[-1].removeprefix("data: "))["error"]
    assert error["code"] == code
    assert error["message"].endswith("why")
    assert 'finish_reason":null' in lines[-2].replace(" ", "")
    assert "[DONE]" not in "".join(lines)


def test_the_official_client_raises_when_a_stream_breaks(unlucky: ApiRig) -> None:
    with pytest.raises(openai.APIError, match="why"):
        list(
            unlucky.openai().completions.create(
                model="tiny", prompt="hi", stream=True, n=2, seed=FIRST_END + 4
            )
        )


@pytest.mark.parametrize("is_announced", [True, False])
def test_requests_cut_off_by_a_stopping_engine_may_be_tried_elsewhere(
    start_rig: StartRig, is_announced: bool
) -> None:
    rig = start_rig()
    call = Asking(rig, "/v1/completions")
    handle = call.request.handle
    ended = () if is_announced else (Ended(handle=handle, message="told to stop"),)
    if is_announced:
        rig.engine.send(EngineStopping(message="told to stop"))
    rig.engine.send(tokens(handle, [], Finish.ABORT, ended=ended))
    assert call.read("told to stop").startswith("HTTP/1.1 503")
    call.leave()


@pytest.mark.parametrize("path", [*BODIES, "/tokenize"])
def test_an_engine_that_is_not_ready_is_a_503_at_once(start_rig: StartRig, path: str) -> None:
    rig = start_rig()
    rig.engine.hello_answer = EngineStarting(message="loading")
    call = Asking(rig, "/v1/completions")
    rig.engine.send_bytes(b"garbage")  # the connection is lost, and made anew
    call.read("503")
    call.leave()
    answer = rig.post(path, **BODIES.get(path, {"prompt": "hi"}))
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_not_ready"
    assert "retry-after" in answer.headers
    assert rig.http.get("/v1/models").status_code == 503
    with pytest.raises(openai.InternalServerError):
        rig.openai().models.list()


def test_a_fault_of_ours_leaves_nothing_running(
    silent: ApiRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("cluster.api.openai.completions.CompletionAnswer", fail)
    once = {"Connection": "close"}  # the server closes it, maybe while the next call is sent
    answer = silent.http.post("/v1/completions", json={"prompt": "hi"}, headers=once)
    assert answer.status_code == 500
    assert "fault" not in answer.text
    request = silent.engine.next_request()
    message = silent.engine.received.get(timeout=10)
    assert isinstance(message, Abort)
    assert message.handle.tolist() == [request.handle]
    assert silent.http.get("/version").status_code == 200
    assert silent.api.calls == {}


def test_labels_of_one_name_do_not_disturb_each_other(silent: ApiRig) -> None:
    rig = silent
    calls = [Asking(rig, "/v1/completions", request_id="same") for _ in range(5)]
    assert len({call.request.handle for call in calls}) == 5
    assert len({call.request.label for call in calls}) == 5
    for call in calls:
        call.leave()
    aborted: set[int] = set()
    while len(aborted) < 5:
        message = rig.engine.received.get(timeout=10)
        assert isinstance(message, Abort)
        aborted |= set(message.handle.tolist())


def test_an_end_that_nobody_waits_for_is_no_fault(silent: ApiRig) -> None:
    rig = silent
    call = Asking(rig, "/v1/completions", stream=True)
    call.leave()
    assert isinstance(rig.engine.received.get(timeout=10), Abort)
    rig.engine.send(tokens(call.request.handle, [300], Finish.STOP))
    assert rig.http.get("/version").status_code == 200
