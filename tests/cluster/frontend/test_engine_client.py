"""One client over a real socket: engines that come, go, and send what they should not."""

import logging
import pickle  # to send one, not to read one
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cluster.errors import AddressError
from cluster.frontend.engine_client import ClientConfig, EngineClient
from cluster.frontend.errors import (
    ClientClosed,
    EngineLost,
    EngineUnreachable,
    ProtocolMismatch,
    WaitTimedOut,
)
from cluster.frontend.requests import LiveRequest
from cluster.keys import write_key_file
from cluster.links.sockets import fresh_keys
from cluster.messages.clients import EngineStarting, GenerationDefaults, Refusal
from scheduler.errors import InvalidRequest
from scheduler.request import Abort, Finish, Rejection
from scheduler.sampling import SamplingParams
from tests.cluster.frontend.fake_engine import (
    ANSWER,
    FakeEngine,
    answer_at_once,
    ipc_address,
    make_info,
    tokens,
)

LONG = SamplingParams(max_tokens=40)


def connect(address: str, **fields: float) -> EngineClient:
    settings: dict[str, object] = {"shortest_redial_s": 0.01, "recovery_s": 0.0}
    return EngineClient(ClientConfig(address=address, **(settings | fields)))  # type: ignore[arg-type]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    with FakeEngine(ipc_address(tmp_path)) as fake:
        yield fake


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[EngineClient]:
    connected = connect(engine.address)
    yield connected
    connected.close()


def start(client: EngineClient, sampling: SamplingParams = LONG) -> LiveRequest:
    return client.submit(client.draft("hi", sampling))


def wait(client: EngineClient, live: LiveRequest) -> None:
    client.wait_done(live, 10.0)


def test_a_request_is_answered(engine: FakeEngine, client: EngineClient) -> None:
    engine.script = answer_at_once
    live = start(client)

    wait(client, live)

    assert live.failure is None
    assert live.outputs[0].text == ANSWER
    assert live.outputs[0].finish is Finish.LENGTH


def test_the_tokenizer_comes_over_the_wire_once(engine: FakeEngine, client: EngineClient) -> None:
    first, second = client.tokenizer(), client.tokenizer()

    assert first is second
    assert first is not None
    assert first.files == engine.files


def test_the_models_defaults_are_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    info = make_info(defaults=GenerationDefaults(temperature=0.5))
    with FakeEngine(ipc_address(tmp_path), info=info) as engine, caplog.at_level(logging.INFO):
        client = connect(engine.address)
        drafts = [client.draft("hi") for _ in range(3)]
        client.close()

    assert {draft.sampling.temperature for draft in drafts} == {0.5}
    assert caplog.text.count("generation_defaults_hold") == 1


def test_an_engine_may_appear_after_the_client(tmp_path: Path) -> None:
    address = ipc_address(tmp_path)
    client = connect(address)
    with FakeEngine(address, script=answer_at_once):
        live = start(client)
        wait(client, live)
        client.close()

    assert live.outputs[0].text == ANSWER


def test_without_an_engine_the_wait_is_bounded_and_says_for_what(tmp_path: Path) -> None:
    client = connect(ipc_address(tmp_path), connect_timeout_s=0.05)
    try:
        for call in (client.info, client.tokenizer, lambda: client.draft("hi")):
            with pytest.raises(EngineUnreachable, match=r"no engine answers at ipc.*0\.05 s"):
                call()
        with pytest.raises(EngineUnreachable):
            client.status(0.05)
    finally:
        client.close()


def test_an_engine_that_still_starts_is_waited_for_and_named(tmp_path: Path) -> None:
    starting = EngineStarting(message="loading weights")
    with FakeEngine(ipc_address(tmp_path), hello_answer=starting) as engine:
        client = connect(engine.address)
        with pytest.raises(EngineUnreachable):
            client.info(0.05)
        client.status()  # answered while it starts, so its news has come too
        with pytest.raises(EngineUnreachable, match="not ready: loading weights"):
            client.info(0.0)
        engine.send(engine.info)
        assert client.info() == engine.info
        client.close()


def test_a_lost_engine_fails_what_is_live_and_the_next_one_serves(tmp_path: Path) -> None:
    address = ipc_address(tmp_path)
    with FakeEngine(address) as engine:
        client = connect(address)
        live = start(client)
        engine.next_request()
    wait(client, live)
    with pytest.raises(EngineUnreachable, match="last connection ended"):
        client.info(0.05)
    with FakeEngine(address, script=answer_at_once):
        again = start(client)
        wait(client, again)
        client.close()

    assert isinstance(live.failure, EngineLost)
    assert address in str(live.failure)
    assert again.failure is None
    assert again.outputs[0].text == ANSWER


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x00garbage",
        pickle.dumps({"type": "tokens"}),
        b"\x81\xa4type\xa7unknown",
        b"\x81\xa4type\xa6tokens",
        b"\xdf\xff\xff\xff\xff",
    ],
    ids=["empty", "garbage", "pickle", "unknown", "fields", "huge"],
)
def test_garbage_from_the_engine_ends_the_connection_not_the_client(
    engine: FakeEngine, client: EngineClient, frame: bytes
) -> None:
    live = start(client)
    engine.next_request()

    engine.send_bytes(frame)
    wait(client, live)
    engine.script = answer_at_once
    again = start(client)
    wait(client, again)

    assert isinstance(live.failure, EngineLost)
    assert again.failure is None
    assert engine.num_hellos == 2


def test_columns_that_cannot_be_end_the_connection_too(
    engine: FakeEngine, client: EngineClient
) -> None:
    live = start(client)
    request = engine.next_request()

    batch = tokens(request.handle, [1, 2])
    engine.send(type(batch)(handle=batch.handle, token=batch.token))
    wait(client, live)

    assert isinstance(live.failure, EngineLost)
    assert "1" in str(live.failure)


def test_an_engine_that_forgot_us_is_greeted_anew(engine: FakeEngine, client: EngineClient) -> None:
    live = start(client)
    engine.next_request()

    engine.send(Refusal(reason="no_hello", message="who are you?"))
    wait(client, live)

    assert isinstance(live.failure, EngineLost)
    assert "who are you?" in str(live.failure)
    assert client.info() == engine.info
    assert engine.num_hellos == 2


def test_another_protocol_is_final(tmp_path: Path) -> None:
    refusal = Refusal(reason="protocol", message="speak 7")
    with FakeEngine(ipc_address(tmp_path), hello_answer=refusal) as engine:
        client = connect(engine.address)
        for _ in range(2):
            with pytest.raises(ProtocolMismatch, match="speak 7"):
                client.info()
        client.close()


@pytest.mark.parametrize(
    "address", ["", "localhost:99", "http://x:1", "tcp://x", "ipc://" + "a" * 200]
)
def test_an_impossible_address_is_refused_at_once(address: str) -> None:
    with pytest.raises(AddressError):
        connect(address)


def test_cancelling_reaches_the_engine(engine: FakeEngine, client: EngineClient) -> None:
    live = start(client)
    request = engine.next_request()

    client.cancel(live)

    message = engine.received.get(timeout=10)
    assert isinstance(message, Abort)
    assert message.handle.tolist() == [request.handle]
    assert live.outputs[0].finish is Finish.ABORT


def test_a_stop_string_reaches_the_engine_as_an_abort(
    engine: FakeEngine, client: EngineClient
) -> None:
    live = start(client, SamplingParams(max_tokens=40, stop=["quick"]))
    request = engine.next_request()
    tokenizer = client.tokenizer()
    assert tokenizer is not None

    engine.send(tokens(request.handle, tokenizer.encode(ANSWER, add_special_tokens=False)))
    wait(client, live)

    message = engine.received.get(timeout=10)
    assert isinstance(message, Abort)
    assert message.handle.tolist() == [request.handle]
    assert (live.outputs[0].text, live.outputs[0].stop_reason) == (" the ", "quick")


def test_closing_aborts_what_is_live(engine: FakeEngine, client: EngineClient) -> None:
    lives = [start(client) for _ in range(3)]
    handles = [engine.next_request().handle for _ in lives]

    client.close()

    message = engine.received.get(timeout=10)
    assert isinstance(message, Abort)
    assert message.handle.tolist() == handles
    assert all(isinstance(live.failure, ClientClosed) for live in lives)
    with pytest.raises(ClientClosed):
        client.info()
    client.close()


def test_closing_without_an_engine_does_not_wait(tmp_path: Path) -> None:
    client = connect(ipc_address(tmp_path), close_timeout_s=60.0)

    client.close()

    assert not any("stoker-client" in thread.name for thread in threading.enumerate())


def test_a_wait_that_ends_leaves_the_request_running(
    engine: FakeEngine, client: EngineClient
) -> None:
    live = start(client)
    request = engine.next_request()

    with pytest.raises(WaitTimedOut, match=r"0\.01 s.*goes on"):
        client.wait_done(live, 0.01)
    engine.send(tokens(request.handle, [5], Finish.LENGTH))
    wait(client, live)

    assert live.outputs[0].token_ids == [5]
    assert live.watchers == []


def test_a_rejection_of_one_leaves_the_others_alone(
    engine: FakeEngine, client: EngineClient
) -> None:
    one, two = start(client), start(client)
    first, second = engine.next_request(), engine.next_request()

    engine.send(Rejection(handle=first.handle, reason="too_long", message="300 of 192 tokens"))
    engine.send(tokens(second.handle, [5], Finish.LENGTH))
    wait(client, one)
    wait(client, two)

    assert isinstance(one.failure, InvalidRequest)
    assert "300 of 192" in str(one.failure)
    assert two.failure is None


def test_a_request_that_is_too_large_for_a_message_is_refused_before_it_leaves(
    tmp_path: Path,
) -> None:
    info = make_info(max_model_len=10_000_000)
    with FakeEngine(ipc_address(tmp_path), info=info) as engine:
        client = connect(engine.address)
        with pytest.raises(InvalidRequest, match="bytes per message"):
            client.submit(client.draft([1] * 4_200_000))
        client.close()


def test_many_threads_share_one_client(engine: FakeEngine, client: EngineClient) -> None:
    engine.script = answer_at_once
    texts: list[str] = []

    def work() -> None:
        for _ in range(10):
            live = start(client)
            wait(client, live)
            texts.append(live.outputs[0].text)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert texts == [ANSWER] * 80


def test_status_is_what_the_engine_says(engine: FakeEngine, client: EngineClient) -> None:
    assert client.status() == engine.status


def test_an_encrypted_engine_answers_holders_of_its_key_file(tmp_path: Path) -> None:
    keys = fresh_keys()
    write_key_file(tmp_path / "key", keys.client)
    with FakeEngine("tcp://127.0.0.1:0", script=answer_at_once, keys=keys.server) as engine:
        client = EngineClient(ClientConfig(address=engine.address, key_file=str(tmp_path / "key")))
        live = start(client)
        wait(client, live)
        client.close()

    assert live.outputs[0].text == ANSWER


def test_who_has_no_key_or_another_one_is_told_so_with_address_and_file(tmp_path: Path) -> None:
    keys, other = fresh_keys(), fresh_keys()
    mixed = msgspec.structs.replace(other.client, server=keys.client.server)
    write_key_file(tmp_path / "other", other.client)
    write_key_file(tmp_path / "mixed", mixed)
    (tmp_path / "notes").write_text("buy = 'milk'")
    wrong = {
        "": "dialled without a key.*key_file .STOKER_KEY_FILE. is needed",
        "other": "hangs up in the handshake.*key file is .*/other",
        "mixed": "refuses our key.*key file is .*/mixed",
        "missing": "cannot read the key file .*/missing: No such file",
        "notes": "notes is not a key file of Stoker",
    }
    with FakeEngine("tcp://127.0.0.1:0", script=answer_at_once, keys=keys.server) as engine:
        for name, why in wrong.items():
            client = EngineClient(
                ClientConfig(
                    address=engine.address,
                    key_file=str(tmp_path / name) if name else "",
                    connect_timeout_s=0.5,
                )
            )
            with pytest.raises(EngineUnreachable, match=why) as caught:
                client.info()
            client.close()
            assert engine.address in str(caught.value)


def test_a_client_follows_an_engine_that_starts_again_with_new_keys(tmp_path: Path) -> None:
    path, old, new = tmp_path / "key", fresh_keys(), fresh_keys()
    write_key_file(path, old.client)
    with FakeEngine("tcp://127.0.0.1:0", script=answer_at_once, keys=old.server) as engine:
        address = engine.address
        client = EngineClient(ClientConfig(address=address, key_file=str(path)))
        wait(client, start(client))
    path.unlink()
    with FakeEngine(address, script=answer_at_once, keys=new.server):
        write_key_file(path, new.client)
        client.info(20.0)
        wait(client, live := start(client))
        client.close()

    assert live.outputs[0].text == ANSWER


def test_tcp_serves_like_a_local_socket() -> None:
    with FakeEngine("tcp://127.0.0.1:0", script=answer_at_once) as engine:
        client = connect(engine.address)
        live = start(client)
        wait(client, live)
        client.close()

    assert live.outputs[0].text == ANSWER
