"""Whatever comes in, the engine lives and the others go on: issue 2, statement 7; case 119.

Here speaks a stranger who uses plain ZeroMQ and plain MessagePack, as any program could.
"""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import numpy as np
import pytest
import zmq

from cluster.frontend.tokenizer import Tokenizer
from cluster.wire import PROTOCOL_VERSION
from stoker import LLM, Client, Handle, InvalidRequest, SamplingParams
from tests.system.served import greedy, settled, text_of, tokens_of

pytestmark = pytest.mark.model

WAIT_MS = 20_000
PROMPT = np.array([100, 200, 300], dtype="<i4").tobytes()


class Stranger:
    """A DEALER socket and nothing of ours."""

    def __init__(self, context: zmq.Context, address: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndtimeo = self._socket.rcvtimeo = WAIT_MS
        self._socket.connect(address)

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def say(self, **message: object) -> None:
        self.send(msgpack.packb(message))

    def hear(self) -> dict[str, object]:
        return msgpack.unpackb(self._socket.recv())

    def close(self) -> None:
        self._socket.close()


Dial = Callable[[str], Stranger]


@pytest.fixture
def dial() -> Iterator[Dial]:
    """Makes strangers, and hangs up for those that are left."""
    strangers: list[Stranger] = []
    with zmq.Context() as context:

        def dial(address: str) -> Stranger:
            strangers.append(Stranger(context, address))
            return strangers[-1]

        yield dial
        for stranger in strangers:
            stranger.close()


ASKED = greedy(16, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[int]:
    return tokens_of(llm.generate("One two three four", ASKED, use_tqdm=False)[0])


@pytest.fixture
def stream(client: Client, expected: list[int]) -> Iterator[Handle]:
    """Somebody who is being answered meanwhile, and must not notice anything."""
    handle = client.submit("One two three four", ASKED)
    yield handle
    assert tokens_of(handle.result(60.0)) == expected


def back_address(llm: LLM) -> str:
    return llm.address.removesuffix("front") + "back"


def test_every_wrong_field_is_refused_by_its_name_and_the_engine_lives(
    llm: LLM, stream: Handle, dial: Dial
) -> None:
    wrong_sampling: dict[str, list[object]] = {
        "temperature": [-1.0, 2.5, float("nan"), float("inf"), "hot", [1]],
        "top_p": [0.0, -0.1, 1.1, "all"],
        "top_k": [-2, 2**31, 1.5, "x"],
        "min_p": [-0.1, 1.5],
        "repetition_penalty": [0.0, -1.0, 1000.0],
        "presence_penalty": [3.0, -3.0],
        "frequency_penalty": [3.0, float("nan")],
        "n": [0, -1, 100_000, 2],
        "seed": [2**63, "lucky", 1.5],
        "max_tokens": [0, -5, "many", 2**40],
        "min_tokens": [-1, 17, 2**40],
        "logprobs": [-1, 21, "all"],
        "prompt_logprobs": [-1, 21],
        "stop_token_ids": [[49_152], [-1], ["a"], 5],
        "logit_bias": [{999_999: 5.0}, {"abc": 1.0}, {5: 1e9}, {5: "x"}, [1]],
        "allowed_token_ids": [[], [49_152], "all"],
        "bad_word_ids": [[[]], [[49_152]], [5]],
        "ignore_eos": [1, "yes"],
        "stop": [[""], 5, ["a"] * 65],
    }
    wrong_fields: dict[str, list[object]] = {
        "prompt": [b"", b"abc", np.array([49_152], "<i4").tobytes(), [1, 2], "text", None],
        "end_ids": [[49_152], [-1], "x"],
        "timeout_s": [0.0, -1.0, float("nan"), "soon"],
        "priority": [3, "high", 2**63],
        "cache_salt": ["", 7],
    }
    wrong_fields["prompt"].append(np.full(1024, 7, "<i4").tobytes())
    cases = [("sampling", {name: value}, name) for name, v in wrong_sampling.items() for value in v]
    cases += [(name, value, name) for name, values in wrong_fields.items() for value in values]
    stranger = dial(llm.address)
    stranger.say(type="client_hello", protocol=PROTOCOL_VERSION)
    assert stranger.hear()["type"] == "server_info"

    for handle, (field, value, _) in enumerate(cases):
        good: dict[str, object] = {
            "handle": handle,
            "prompt": PROMPT,
            "sampling": {"temperature": 0.0, "max_tokens": 16},
        }
        if field == "sampling":
            assert isinstance(value, dict)
            value = {"temperature": 0.0, "max_tokens": 16, "seed": 1} | value
        stranger.say(type="request", **(good | {field: value}))

    for handle, (_, value, name) in enumerate(cases):
        answer = stranger.hear()
        assert answer["type"] == "rejection", (name, value, answer)
        assert answer["handle"] == handle
        assert answer["reason"] in ("invalid", "too_long"), answer
        assert name in str(answer["message"]), (name, value, answer)


def test_handles_that_cannot_be_are_refused(llm: LLM, stream: Handle, dial: Dial) -> None:
    stranger = dial(llm.address)
    stranger.say(type="client_hello", protocol=PROTOCOL_VERSION)
    stranger.hear()
    for handle in (-1, 2**31, 2**63, "one", None, 1.5):
        sampling = {"temperature": 0.0}
        stranger.say(type="request", handle=handle, prompt=PROMPT, sampling=sampling)
        assert stranger.hear()["type"] in ("rejection", "refusal")


class Bomb:
    """What a pickle could do."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.mkdir, (str(self._mark),)


@pytest.mark.parametrize("socket", ["front", "back"])
def test_garbage_pickles_and_oversized_frames_harm_nobody(
    socket: str, llm: LLM, stream: Handle, dial: Dial, tmp_path: Path
) -> None:
    address = llm.address if socket == "front" else back_address(llm)
    mark = tmp_path / "ran"
    before = llm.client.status().totals.num_dropped
    rng = np.random.default_rng(7)
    frames = [
        pickle.dumps(Bomb(mark)),
        b"",
        b"\xc1",
        b"\x00" * 1000,
        msgpack.packb({"type": "no_such_thing"}),
        msgpack.packb(["type", "client_hello"]),
        msgpack.packb({"type": "result", "epoch": 1, "step": 1}),
        msgpack.packb({"type": "shutdown", "drain_s": 0.0}),
        msgpack.packb({"type": "worker_failed", "group": 0, "epoch": 1, "rank": 0, "message": ""}),
        msgpack.packb({"type": "group_stopped", "group": 0, "epoch": 1}),
        msgpack.packb({"type": "abort", "handle": np.arange(9, dtype="<i4").tobytes()}),
        b"\x81" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        *(rng.bytes(int(size)) for size in rng.integers(1, 3000, 30)),
    ]
    for frame in frames:
        stranger = dial(address)
        stranger.send(frame)
        stranger.send(frame, frame)
        stranger.close()
    patient = dial(address)
    for frame in frames:
        patient.send(frame)
    huge = dial(address)
    huge.send(bytes(100 << 20))

    status = settled_count(llm.client, before + len(frames))
    assert status > before
    assert not mark.exists()
    assert pickle.loads(frames[0]) is None  # noqa: S301  # it would have worked
    assert mark.exists()


def settled_count(client: Client, wanted: int) -> int:
    """Dropped messages, once as many as wanted were counted."""
    for _ in range(2000):
        dropped = client.status().totals.num_dropped
        if dropped >= wanted:
            return dropped
    raise AssertionError(f"{dropped} messages were counted as dropped, {wanted} were sent")


@pytest.mark.parametrize("socket", ["front", "back"])
def test_another_protocol_version_is_told_both_numbers(
    socket: str, llm: LLM, stream: Handle, dial: Dial
) -> None:
    if socket == "front":
        stranger = dial(llm.address)
        stranger.say(type="client_hello", protocol=99)
    else:
        stranger = dial(back_address(llm))
        stranger.say(
            type="supervisor_hello", protocol=99, engine_id=llm.client.info().engine_id, key="x"
        )
    answer = stranger.hear()
    assert (answer["type"], answer["reason"]) == ("refusal", "protocol")
    assert "99" in str(answer["message"])
    assert f"protocol {PROTOCOL_VERSION}" in str(answer["message"])


def test_nobody_poses_as_a_worker_or_as_the_supervisor(
    llm: LLM, stream: Handle, dial: Dial
) -> None:
    engine_id = llm.client.info().engine_id
    capacity = {"num_blocks": 1, "block_bytes": 1, "vocab_size": 1, "max_model_len": 1}
    worker = {"group": 0, "epoch": 1, "rank": 0, "capacity": capacity}
    for hello, more in (("worker_hello", worker), ("supervisor_hello", {})):
        stranger = dial(back_address(llm))
        stranger.say(
            type=hello, protocol=PROTOCOL_VERSION, engine_id=engine_id, key="guess", **more
        )
        assert stranger.hear()["reason"] == "stranger"


VANISHING = """
import sys
from stoker import Client, SamplingParams
client = Client(sys.argv[1])
asked = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)
handles = [client.submit(f"Tell me {i}", asked) for i in range(4)]
for handle in handles:
    next(iter(handle))
print("streaming", flush=True)
sys.stdin.read()
"""


def test_case_58_a_killed_client_frees_all_that_it_had(llm: LLM, stream: Handle) -> None:
    before = llm.client.status()
    process = subprocess.Popen(
        [sys.executable, "-c", VANISHING, llm.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"streaming\n"
        assert llm.client.status().num_running >= 4
        os.kill(process.pid, signal.SIGKILL)
    stream.result(60.0)

    after = settled(llm.client, before.num_clients)
    aborts = after.totals.finished["abort"] - before.totals.finished.get("abort", 0)
    assert aborts == 4
    assert after.totals.output_tokens - before.totals.output_tokens < 4 * 900


def test_case_53_an_empty_prompt_is_refused_in_every_form(llm: LLM) -> None:
    for empty in ("", [""], {"prompt_token_ids": []}, {"prompt": ""}, [[]]):
        with pytest.raises(InvalidRequest, match="empty"):
            llm.generate(empty, greedy(1), use_tqdm=False)
    assert llm.generate([], greedy(1), use_tqdm=False) == []
    with pytest.raises(InvalidRequest):
        llm.chat([], greedy(1), use_tqdm=False)
    assert text_of(llm.generate("1, 2, 3,", greedy(2), use_tqdm=False)[0]) == " 4"


def test_case_55_ids_outside_the_vocabulary_are_refused(llm: LLM) -> None:
    for wrong in ([49_152], [-1], [5, 10**9]):
        with pytest.raises(InvalidRequest, match=r"0 to 49151|49151"):
            llm.generate({"prompt_token_ids": wrong}, greedy(1), use_tqdm=False)
    for bias in ({999_999: 5.0}, {"abc": 1.0}, {1: 1e9}):
        with pytest.raises(InvalidRequest, match="logit_bias"):
            llm.generate("x", greedy(1, logit_bias=bias), use_tqdm=False)


@pytest.mark.slow
def test_case_74_prompts_around_the_context_are_refused_with_both_numbers(
    llm: LLM, tokenizer: Tokenizer
) -> None:
    for length in (1024, 1025, 9000):
        with pytest.raises(InvalidRequest, match=rf"(?s){length}.*1024"):
            llm.generate({"prompt_token_ids": [7] * length}, greedy(1), use_tqdm=False)
    (most,) = llm.generate({"prompt_token_ids": [7] * 1023}, greedy(8), use_tqdm=False)
    assert len(tokens_of(most)) == 1
    assert most.outputs[0].finish_reason in ("length", "stop")


def test_case_57_one_name_for_many_requests_confuses_nobody(client: Client) -> None:
    prompts = [f"{at}, {at + 1}, {at + 2}," for at in range(10)]
    handles = [client.submit(prompt, greedy(3), request_id="one name") for prompt in prompts]
    apart = client.generate(prompts, greedy(3))
    assert [tokens_of(h.result()) for h in handles] == [tokens_of(one) for one in apart]


def test_case_61_a_storm_of_aborts_under_load_harms_nobody(client: Client, stream: Handle) -> None:
    rng = np.random.default_rng(61)
    asked = SamplingParams(temperature=1.0, max_tokens=50, ignore_eos=True)
    waiting: list[Handle] = []
    for at in range(150):
        waiting.append(client.submit(f"Number {at}", asked))
        if len(waiting) > 20:
            waiting.pop(int(rng.integers(len(waiting)))).cancel()
    for handle in waiting:
        handle.cancel()
    stream.result(60.0)
    settled(client)
