"""How calls end: answered, left by the client, refused by the engine, or broken on the way."""

import json
import socket
import threading
from collections.abc import Callable

import httpx
import openai
import pytest

from cluster.messages import EngineStarting, EngineStopping
from scheduler.request import Abort, Ended, Finish, Rejection, Request
from tests.cluster.api.conftest import StartRig
from tests.cluster.api.rig import ApiRig, spoken
from tests.cluster.frontend.fake_engine import tokens

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

    def read(self) -> bytes:
        return self._socket.recv(65536)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_client_that_leaves_has_its_request_aborted_at_once(
    start_rig: StartRig, path: str, stream: bool, has_begun: bool
) -> None:
    rig = start_rig()
    call = Asking(rig, path, stream=stream, max_tokens=30)
    if has_begun:
        rig.engine.send(tokens(call.request.handle, [300]))
    if has_begun and stream:
        assert b"200 OK" in call.read()

    call.leave()

    message = rig.engine.received.get(timeout=10)
    assert isinstance(message, Abort)
    assert message.handle.tolist() == [call.request.handle]
    assert rig.http.get("/version").status_code == 200  # later than the end of that call
    assert rig.api.calls == {}


def test_all_requests_of_a_call_are_aborted_when_its_client_leaves(start_rig: StartRig) -> None:
    rig = start_rig()
    call = Asking(rig, "/v1/completions", prompt=["a", "b"], n=2)
    others = [rig.engine.next_request() for _ in range(3)]
    call.leave()
    handles: set[int] = set()
    while len(handles) < 4:
        message = rig.engine.received.get(timeout=10)
        assert isinstance(message, Abort)
        handles |= set(message.handle.tolist())
    assert handles == {request.handle for request in (call.request, *others)}


def answered_by(make: Callable[[Request], object]) -> Callable[[Request], list[object]]:
    return lambda request: [make(request)]


REJECTIONS = [
    ("invalid", 400, openai.BadRequestError),
    ("too_long", 400, openai.BadRequestError),
    ("queue_full", 429, openai.RateLimitError),
    ("timeout", 408, openai.APIStatusError),
    ("shutting_down", 503, openai.InternalServerError),
    ("no_workers", 503, openai.InternalServerError),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("reason", "status", "kind"), REJECTIONS, ids=lambda value: str(value))
def test_a_rejection_has_its_status_also_for_a_stream(
    start_rig: StartRig, reason: str, status: int, kind: type[Exception], stream: bool
) -> None:
    def reject(request: Request) -> object:
        return Rejection(
            handle=request.handle, reason=reason, message="no room", param="n", retry_after_s=2.4
        )

    rig = start_rig(script=answered_by(reject))
    answer = rig.post("/v1/chat/completions", messages=HI, stream=stream)
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == "no room"
    assert answer.headers.get("retry-after") == (None if status == 400 else "3")
    with pytest.raises(kind):
        rig.openai().completions.create(model="tiny", prompt="hi", stream=stream)
    assert rig.api.calls == {}


ENDS = [
    (Finish.ABORT, 499, "request_cancelled"),
    (Finish.TIMEOUT, 408, "request_timeout"),
    (Finish.ERROR, 500, "internal_error"),
]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(("finish", "status", "code"), ENDS, ids=lambda value: str(value))
def test_an_answer_that_is_not_whole_is_an_error(
    start_rig: StartRig, path: str, n: int, finish: Finish, status: int, code: str
) -> None:
    def script(request: Request) -> list[object]:
        """The first output ends well, the last one does not."""
        if request.handle < n:
            return spoken(request, [300, 301])  # type: ignore[return-value]
        handle = request.handle
        end = tokens(handle, [302], finish, ended=(Ended(handle=handle, message="why"),))
        return [tokens(handle, [300]), end]

    rig = start_rig(script=script)
    answer = rig.post(path, **BODIES[path], n=n)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert answer.json()["error"]["message"] == "why"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("finish", "status", "code"), ENDS, ids=lambda value: str(value))
def test_a_stream_that_breaks_ends_with_an_error_and_without_done(
    start_rig: StartRig, path: str, finish: Finish, status: int, code: str
) -> None:
    rig = start_rig()

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
    assert (error["code"], error["message"]) == (code, "why")
    assert 'finish_reason":null' in lines[-2].replace(" ", "")
    assert "[DONE]" not in "".join(lines)


def test_the_official_client_raises_when_a_stream_breaks(start_rig: StartRig) -> None:
    def script(request: Request) -> list[object]:
        handle = request.handle
        end = Ended(handle=handle, message="out of luck")
        return [
            tokens(handle, rig.tokenizer.encode(" the")[1:]),
            tokens(handle, [], Finish.ERROR, ended=(end,)),
        ]

    rig = start_rig(script=script)
    with pytest.raises(openai.APIError, match="out of luck"):
        list(rig.openai().completions.create(model="tiny", prompt="hi", stream=True))


def test_requests_cut_off_by_a_stopping_engine_may_be_tried_elsewhere(start_rig: StartRig) -> None:
    rig = start_rig()
    call = Asking(rig, "/v1/completions")
    rig.engine.send(EngineStopping(message="told to stop"))
    rig.engine.send(tokens(call.request.handle, [], Finish.ABORT))
    answer = call.read().decode()
    assert answer.startswith("HTTP/1.1 503")
    assert "told to stop" in answer
    call.leave()


@pytest.mark.parametrize("path", [*BODIES, "/tokenize"])
def test_an_engine_that_is_not_ready_is_a_503_at_once(start_rig: StartRig, path: str) -> None:
    rig = start_rig()
    rig.engine.hello_answer = EngineStarting(message="loading")
    call = Asking(rig, "/v1/completions")
    rig.engine.send_bytes(b"garbage")  # the connection is lost, and made anew
    assert call.read().decode().startswith("HTTP/1.1 503")
    call.leave()
    answer = rig.post(path, **BODIES.get(path, {"prompt": "hi"}))
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_not_ready"
    assert "retry-after" in answer.headers
    assert rig.http.get("/v1/models").status_code == 503
    with pytest.raises(openai.InternalServerError):
        rig.openai().models.list()


def test_labels_of_one_name_do_not_disturb_each_other(start_rig: StartRig) -> None:
    rig = start_rig()
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


def test_an_end_that_nobody_waits_for_is_no_fault(start_rig: StartRig) -> None:
    rig = start_rig()
    call = Asking(rig, "/v1/completions", stream=True)
    call.leave()
    assert isinstance(rig.engine.received.get(timeout=10), Abort)
    rig.engine.send(tokens(call.request.handle, [300], Finish.STOP))
    assert rig.http.get("/version").status_code == 200
