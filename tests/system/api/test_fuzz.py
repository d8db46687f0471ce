"""Bodies that no program would send, and clients that leave at any moment: statement 4.

Nothing is answered with a fault of ours, nothing hangs, and nothing is left in the engine.
"""

import contextlib
import copy
import json
import random
import re
import subprocess
import sys
import time

import httpx
import pytest

from cluster.api.openai.chat_body import ChatBody
from cluster.api.openai.completion_body import CompletionBody
from cluster.api.openai.responses_body import ResponsesBody
from stoker import Client
from tests.cluster.api.raw import Raw, head
from tests.system.api.serving import Serving
from tests.system.served import settled

pytestmark = pytest.mark.model

MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "Once upon", "max_tokens": 2, "logprobs": 1, "stop": ["x"]},
    "/v1/chat/completions": {
        "messages": MESSAGES,
        "max_tokens": 2,
        "logprobs": True,
        "top_logprobs": 1,
        "stream": False,
    },
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2, "stream": False},
    "/tokenize": {"prompt": "Hi", "add_special_tokens": True},
    "/detokenize": {"tokens": [1, 2, 3]},
}
ODD: list[object] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**40),
    *(0.5, -0.0, 1e308, 1e-320),
    *("", "a", "\x00", "\ud800", "é" * 100, "🧑\u200d🚀", " ", "null", "x" * 5000),
    *([], [[]], [None], [0], ["a"], [{"type": "text"}], [{"role": "user"}], [[[[[]]]]]),
    *({}, {"a": 1}, {"": None}),
]
NOT_JSON = [
    b"", b"{", b"}", b"[]", b"null", b"5", b'"a"', b"\xff\xfe", b"\x00", b"{'a': 1}", b'{"a": NaN}',
    b'{"prompt": Infinity}', b'{"a": 1} x', b'{"prompt": "\\ud800"}', b'{"prompt": "\xed\xa0\x80"}',
    b'{"a": 1, "a": 2}', b"[" * 50_000, b'{"prompt": ' * 20_000,
]  # fmt: skip


def mutated(body: dict[str, object], dice: random.Random) -> dict[str, object]:
    """The same with one to three of its values replaced, added, or taken away, at any depth."""
    changed: dict[str, object] = copy.deepcopy(body)
    for _ in range(dice.randint(1, 3)):
        place: object = changed
        while isinstance(place, dict | list) and place:
            keys: list[object] = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = dice.choice(keys)
            inner = place[key]  # type: ignore[index,call-overload]
            if isinstance(inner, dict | list) and inner and dice.random() < 0.6:
                place = inner
                continue
            if isinstance(place, dict) and dice.random() < 0.3:
                key = dice.choice(FIELDS)
            if dice.random() < 0.15:
                place.pop(key, None) if isinstance(place, dict) else place.pop(key)
            else:
                odd = copy.deepcopy(dice.choice(ODD))  # it may be changed itself in the next turn
                place[key] = odd  # type: ignore[index,call-overload]
            break
    return changed


FIELDS = sorted(
    {
        "unknown_field",
        *ChatBody.model_fields,
        *CompletionBody.model_fields,
        *ResponsesBody.model_fields,
    }
)


def check_answer(answer: httpx.Response, sent: object) -> None:
    assert answer.status_code < 500, (sent, answer.text[:500])
    if answer.status_code >= 400:
        assert answer.json()["error"]["message"], sent


@pytest.fixture
def small(http: httpx.Client) -> httpx.Client:
    """The same client; answers that would go on and on are cut off by a default of ours."""
    http.headers["X-Request-Timeout"] = "2"
    return http


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2, 3))])
@pytest.mark.parametrize("path", BODIES)
def test_bodies_with_odd_values_are_answered_or_refused(
    small: httpx.Client, path: str, seed: int
) -> None:
    dice = random.Random(f"{seed} {path}")
    for _ in range(40 if seed == 0 else 300):
        body = mutated(BODIES[path], dice)
        # Half of a surrogate pair can be written in JSON, if not in UTF-8.
        answer = small.post(
            path, content=json.dumps(body), headers={"Content-Type": "application/json"}
        )
        check_answer(answer, body)


@pytest.mark.parametrize("path", [*BODIES, "/v1/requests/x/cancel"])
def test_bodies_that_are_no_json_are_refused(small: httpx.Client, path: str) -> None:
    for body in NOT_JSON:
        answer = small.post(path, content=body, headers={"Content-Type": "application/json"})
        check_answer(answer, body[:80])
        assert answer.status_code in (400, 404), body[:80]


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2, 3))])
def test_clients_that_leave_at_any_moment_leave_nothing_behind(
    served: Serving, engine_client: Client, seed: int
) -> None:
    """In the middle of the request, of the wait, or of the answer; streamed or not; n 1 and 2."""
    dice = random.Random(seed)
    began = engine_client.status().totals
    for turn in range(24 if seed == 0 else 150):
        path = dice.choice([path for path in BODIES if path.startswith("/v1/")])
        body = BODIES[path] | {"stream": dice.random() < 0.6, "ignore_eos": True}
        body["max_output_tokens" if path.endswith("responses") else "max_tokens"] = 400
        if path != "/v1/responses":
            body |= {"n": dice.choice([1, 2]), "temperature": 1}
        data = json.dumps(body).encode()
        request = (
            head(
                path,
                f"Authorization: Bearer {served.api_key}",
                "Content-Type: application/json",
                f"Content-Length: {len(data)}",
            )
            + data
        )
        leave(served, request, dice, pipelines=turn % 4 == 3)
    left = time.monotonic()
    status = settled(engine_client)
    assert time.monotonic() - left < 10.0
    assert status.totals.num_requests > began.num_requests
    assert status.num_clients == 2, "the API server and us: nobody was cut off"


def leave(served: Serving, request: bytes, dice: random.Random, *, pipelines: bool) -> None:
    """Send all or a part of a request, read all or none of some bytes, and go."""
    with Raw(served.base_url) as raw:
        if dice.random() < 0.3:
            raw.send(request[: dice.randrange(len(request))])
        else:
            raw.send(request * (2 if pipelines else 1))
            if dice.random() < 0.7:
                raw.socket.settimeout(0.3)
                with contextlib.suppress(TimeoutError):
                    raw.socket.recv(dice.choice([1, 200, 2000]))
        if dice.random() < 0.3:
            raw.reset()


@pytest.mark.parametrize(
    "options",
    [
        ("--phases=fuzzing", "--max-examples=1"),
        pytest.param(("--phases=examples,coverage",), marks=pytest.mark.slow),
        pytest.param(("--phases=fuzzing", "--max-time=120"), marks=pytest.mark.slow),
        pytest.param(("--phases=stateful", "--max-time=60"), marks=pytest.mark.slow),
    ],
    ids=lambda options: " ".join(options),
)
def test_statement_4_schemathesis_finds_no_fault_and_no_hang(
    served: Serving, engine_client: Client, options: tuple[str, ...]
) -> None:
    done = subprocess.run(
        [
            sys.executable,
            *("-m", "schemathesis.cli", "run", f"{served.base_url}/openapi.json"),
            *("--header", f"Authorization: Bearer {served.api_key}"),
            *("--header", "X-Request-Timeout: 1"),  # what is asked may be a very long answer
            *("--checks", "not_a_server_error"),
            *("--exclude-path", "/live"),  # it has no end
            # Others use this cluster, and it would have other processes after these.
            *("--exclude-path-regex", "^/admin/(drain|reload|upgrade)$"),
            *("--request-timeout", "60"),
            *("--generation-database=none", "--no-color", "--seed=1"),
            *("--warnings=off", "--suppress-health-check=all"),
            *options,
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=550,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert found is not None, done.stdout
    assert int(found[1]) >= 13, "one for each operation"
    settled(engine_client)
