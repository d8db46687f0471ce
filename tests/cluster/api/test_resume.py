"""Calls with an idempotency key over real sockets: left, come back to, joined, stored, bounded."""

import asyncio
import json
import random
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import httpx
import pytest

from scheduler.request import Abort, Finish, Request
from tests.cluster.api.conftest import StartRig
from tests.cluster.api.openai.streamed import Received, joined, received
from tests.cluster.api.raw import head
from tests.cluster.api.rig import ApiRig, script_of
from tests.cluster.frontend.fake_engine import make_info, say_nothing, tokens
from tests.cluster.frontend.tiny_tokenizers import make_tokenizer

CHAT = "/v1/chat/completions"
BODIES: dict[str, dict[str, object]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi", "max_tokens": 90},
    "/v1/responses": {"input": "hi"},
}
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "Zürich"}}\n</tool_call>'
TEXT = " the quick brown fox jumps over the lazy dog" * 4 + CALL


ROOMY = make_info(max_model_len=4096)


class Reader:
    """One client, which loses its connection wherever it is told to."""

    def __init__(self, path: str, key: str, **fields: object) -> None:
        self._path = path
        self._body = {**BODIES[path], "stream": True, **fields}
        self._headers = {"Idempotency-Key": key}
        self.events: list[Received] = []
        self.is_over = False

    def read(self, http: httpx.Client, num_bytes: int | None = None) -> None:
        """Connect, read so much of what follows, and leave without a word."""
        headers = dict(self._headers)
        if self.events:
            headers["Last-Event-ID"] = self.events[-1].event_id
        body = b""
        with http.stream("POST", self._path, json=self._body, headers=headers) as answer:
            if answer.status_code != 200:
                raise AssertionError(answer.read())
            for part in answer.iter_raw(64):
                body += part
                if num_bytes is not None and len(body) >= num_bytes:
                    break
            else:
                self.is_over = True
        whole, _, _ = body.rpartition(b"\n\n")
        if whole:
            self.events += [each for each in received(whole + b"\n\n") if each.data is not None]


def told(reader: Reader) -> object:
    """All that a reader was told, but for what calls of one body have of their own."""
    parts = joined(reader.events).parts
    parts.pop("events", None)
    text = re.sub(r"((?:chatcmpl|cmpl|resp|msg|fc|call)[-_])[0-9a-f]{24}", r"\1", json.dumps(parts))
    return json.loads(re.sub(r'("created(?:_at)?": )\d+', r"\g<1>0", text))


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiRig]:
    script = script_of(make_tokenizer("llama3_like"), TEXT, num_cached=2)
    with ApiRig(tmp_path_factory.mktemp("rig"), script=script, info=ROOMY) as rig:
        yield rig


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiRig]:
    """Another front end, which knows nothing of the first one's calls and has another pace."""
    script = script_of(make_tokenizer("llama3_like"), TEXT, num_cached=2, per_step=3)
    with ApiRig(tmp_path_factory.mktemp("other"), script=script, info=ROOMY) as rig:
        yield rig


FIELDS: dict[str, tuple[dict[str, object], ...]] = {
    CHAT: (
        {},
        {"n": 3, "logprobs": True, "stop": ["lazy"]},
        {"return_token_ids": True, "stream_options": {"include_usage": True}},
        {"tools": [{"type": "function", "function": {"name": "now"}}]},
    ),
    "/v1/completions": ({}, {"prompt": ["a", "b"], "n": 2, "echo": True, "logprobs": 1}),
    "/v1/responses": (
        {},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 1},
        {"tools": [{"type": "function", "name": "now", "parameters": {}}]},
    ),
}


def disturbed(
    rigs: Sequence[ApiRig], path: str, fields: dict[str, object], chance: random.Random
) -> int:
    """Lose connections at random until a stream is whole, on any front end; returns how many."""
    fields = {"temperature": 1, **fields}
    whole = Reader(path, f"whole-{chance.random()}", **fields)
    whole.read(rigs[0].http)
    reader = Reader(path, f"cut-{chance.random()}", **fields)
    num_lost = 0
    while not reader.is_over:
        is_kind = chance.random() < 0.05
        reader.read(chance.choice(rigs).http, None if is_kind else chance.randint(1, 2000))
        num_lost += not reader.is_over
    assert told(reader) == told(whole)
    return num_lost


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_is_cut_off_anywhere_is_the_same_in_the_end(
    rig: ApiRig, other: ApiRig, path: str
) -> None:
    chance = random.Random(path)
    for fields in FIELDS[path]:
        num_lost = sum(disturbed([rig, other], path, fields, chance) for _ in range(3))
        assert num_lost > 0


@pytest.mark.slow
def test_statement_3_a_thousand_disconnects_lose_and_double_no_token(
    rig: ApiRig, other: ApiRig
) -> None:
    chance = random.Random(3)
    num_lost = 0
    while num_lost < 1000:
        path = chance.choice(list(BODIES))
        num_lost += disturbed([rig, other], path, chance.choice(FIELDS[path]), chance)


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiRig]:
    """An engine that answers only what a test has it say, and a server that keeps little."""
    folder = tmp_path_factory.mktemp("silent")
    with ApiRig(folder, script=say_nothing, resume_bytes=20_000) as rig:
        yield rig


class Asking:
    """One call in a thread, in the middle of which a test can act or leave."""

    def __init__(self, rig: ApiRig, key: str, *, token: str = "any", **fields: object) -> None:
        headers = {"Idempotency-Key": key, "Authorization": f"Bearer {token}"}
        body = {"prompt": "hi", "max_tokens": 30, **fields}
        self.answer: httpx.Response | None = None

        def ask() -> None:
            self.answer = rig.http.post("/v1/completions", json=body, headers=headers)

        self._thread = threading.Thread(target=ask)
        self._thread.start()

    def end(self) -> httpx.Response:
        self._thread.join(30)
        assert self.answer is not None
        return self.answer


def leave(rig: ApiRig, key: str, num_calls: int = 0, **fields: object) -> Request:
    """Ask on a raw socket, and be gone once the engine has the request."""
    body = json.dumps({"prompt": "hi", "max_tokens": 30, **fields}).encode()
    asking = socket.create_connection(("127.0.0.1", int(rig.url.rpartition(":")[2])), 30)
    lines = (f"Idempotency-Key: {key}", "Authorization: Bearer any", JSON)
    asking.sendall(head("/v1/completions", f"Content-Length: {len(body)}", *lines) + body)
    request = rig.engine.next_request()
    asking.close()
    on_loop(rig, lambda: len(rig.api.calls) == num_calls)
    return request


JSON = "Content-Type: application/json"


def on_loop(rig: ApiRig, condition: Callable[[], bool]) -> None:
    """Wait until something holds, asked where it cannot change meanwhile."""

    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.001)

    asyncio.run_coroutine_threadsafe(wait(), rig.loop).result(30)


def say(rig: ApiRig, request: Request, text: str, finish: Finish = Finish.NOT_YET) -> None:
    ids = rig.tokenizer.encode(text, add_special_tokens=False)
    rig.engine.send(tokens(request.handle, ids, finish))


def test_two_calls_with_one_key_are_one_request(silent: ApiRig) -> None:
    first = Asking(silent, "two")
    request = silent.engine.next_request()
    second = Asking(silent, "two")
    on_loop(silent, lambda: len(silent.api.calls) == 2)

    say(silent, request, " fox", Finish.LENGTH)
    answers = [first.end(), second.end(), Asking(silent, "two").end()]

    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    assert silent.engine.received.empty()


def test_a_call_goes_on_while_its_client_is_gone(silent: ApiRig) -> None:
    request = leave(silent, "gone")
    say(silent, request, " quick fox", Finish.LENGTH)
    assert Asking(silent, "gone").end().json()["choices"][0]["text"] == " quick fox"
    assert silent.engine.received.empty()


def test_the_same_key_means_another_call_for_another_caller(silent: ApiRig) -> None:
    mine, mine_request = Asking(silent, "k", token="mine"), silent.engine.next_request()
    theirs, their_request = Asking(silent, "k", token="theirs"), silent.engine.next_request()
    say(silent, mine_request, " mine", Finish.LENGTH)
    say(silent, their_request, " theirs", Finish.LENGTH)
    answers = [mine.end().json(), theirs.end().json()]
    assert [answer["choices"][0]["text"] for answer in answers] == [" mine", " theirs"]
    assert answers[0]["id"] != answers[1]["id"]
    assert mine_request.sampling.seed != their_request.sampling.seed


def test_a_key_is_for_one_body(silent: ApiRig) -> None:
    request = leave(silent, "body")
    answer = Asking(silent, "body", max_tokens=31).end()
    assert answer.status_code == 422
    assert answer.json()["error"]["code"] == "idempotency_key_reused"
    say(silent, request, " fox", Finish.LENGTH)
    assert Asking(silent, "body").end().status_code == 200


def test_what_failed_is_forgotten(silent: ApiRig) -> None:
    first, request = Asking(silent, "fails"), silent.engine.next_request()
    say(silent, request, " half", Finish.ERROR)
    assert first.end().status_code == 500
    second, request = Asking(silent, "fails"), silent.engine.next_request()
    say(silent, request, " whole", Finish.LENGTH)
    assert second.end().json()["choices"][0]["text"] == " whole"


def test_what_is_kept_for_clients_that_are_gone_is_bounded(start_rig: StartRig) -> None:
    """Each of these may grow to 30 tokens, about 3 kB; the longest left go first."""
    rig = start_rig(resume_bytes=20_000)
    handles: list[int] = []
    for number in range(20):
        handles.append(leave(rig, str(number)).handle)
        if number >= 6:
            message = rig.engine.received.get(timeout=30)
            assert isinstance(message, Abort)
            assert message.handle.tolist() == [handles[number - 6]]
    assert len(rig.api.kept) == 6
    assert rig.api.kept.num_bytes <= 20_000
    assert rig.api.engine.num_live == 6


def test_after_its_time_a_call_is_aborted(start_rig: StartRig) -> None:
    rig = start_rig(resume_s=0.01)
    request = leave(rig, "late")
    message = rig.engine.received.get(timeout=30)
    assert isinstance(message, Abort)
    assert message.handle.tolist() == [request.handle]
    assert not len(rig.api.kept)


def test_a_seed_that_is_not_named_follows_from_the_key(start_rig: StartRig) -> None:
    """On any server, so that one that never heard of the call goes on with it."""
    seeds = [leave(start_rig(), key, n=2).sampling.seed for key in ("a", "a", "b")]
    assert seeds[0] == seeds[1] != seeds[2]


HEADERS: list[Mapping[str, str]] = [
    {"Last-Event-ID": "1-0-0"},
    {"Idempotency-Key": "two words"},
    {"Idempotency-Key": "k" * 256},
    {"Idempotency-Key": "key", "Last-Event-ID": "nonsense"},
    {"Idempotency-Key": "key", "Last-Event-ID": "1-0-0_0"},
]


@pytest.mark.parametrize("headers", HEADERS, ids=str)
def test_a_header_that_cannot_be_is_refused(rig: ApiRig, headers: Mapping[str, str]) -> None:
    body = {"prompt": "hi", "stream": True}
    answer = rig.http.post("/v1/completions", json=body, headers=dict(headers))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in headers


def test_without_a_key_events_have_no_ids(rig: ApiRig) -> None:
    answer = rig.http.post("/v1/completions", json={"prompt": "hi", "stream": True})
    assert all(line.startswith("data: ") for line in answer.text.split("\n") if line)
