"""Both clients over real sockets, while engines end and others come to the same address."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from cluster.frontend.engine_client import ClientConfig, EngineClient
from cluster.frontend.errors import ClientClosed, EngineLost
from cluster.frontend.loop_client import LoopClient
from cluster.frontend.requests import LiveRequest
from cluster.frontend.tokenizer import Tokenizer
from cluster.messages.clients import EngineStopping, Refusal
from cluster.messages.sockets import ToClient
from scheduler.request import Finish, Request
from tests.cluster.frontend.fake_engine import (
    ANSWER,
    FakeEngine,
    answer_at_once,
    ipc_address,
    make_info,
    tokens,
)
from tests.cluster.frontend.test_engine_client import start, wait
from tests.cluster.frontend.test_loop_client import from_thread
from tests.cluster.frontend.test_loop_client import start as start_on_loop
from tests.cluster.frontend.test_loop_client import wait as wait_on_loop
from tests.cluster.frontend.tiny_tokenizers import llama3_like

IDS = Tokenizer(llama3_like()).encode(ANSWER, add_special_tokens=False)


def config(address: str, **fields: object) -> ClientConfig:
    settings = {"address": address, "shortest_redial_s": 0.01, "recovery_s": 30.0, **fields}
    return ClientConfig(**settings)  # type: ignore[arg-type]


def first_two(request: Request) -> list[ToClient]:
    """The beginning of an answer, of an engine that will not finish it."""
    return [tokens(request.handle, IDS[:2])]


def stop_and_answer(request: Request) -> list[ToClient]:
    """Of an engine that was asked to end, and gives the answers that it owes before."""
    return [EngineStopping(message="asked to end"), *answer_at_once(request)]


def levels_of(event: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.levelname for record in caplog.records if event in record.message]


def has_begun(client: EngineClient, live: LiveRequest) -> None:
    client.wait_for(live, lambda: len(live.outputs[0].token_ids) == 2, 10.0)


def test_the_end_of_an_engine_that_has_said_so_is_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    address = ipc_address(tmp_path)
    client = EngineClient(config(address))
    with FakeEngine(address, script=stop_and_answer):
        wait(client, start(client))
    with FakeEngine(address, script=answer_at_once):
        wait(client, start(client))
        client.close()

    assert levels_of("connection_lost", caplog) == ["INFO"]


def test_on_a_loop_too_the_end_of_an_engine_that_has_said_so_is_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    address = ipc_address(tmp_path)

    async def scene(client: LoopClient) -> None:
        with FakeEngine(address, script=stop_and_answer) as first:
            await wait_on_loop(await start_on_loop(client))
            await from_thread(first.close)
        with FakeEngine(address, script=answer_at_once):
            await wait_on_loop(await start_on_loop(client))

    play(scene, address)

    assert levels_of("connection_lost", caplog)[0] == "INFO"


def test_a_request_goes_on_with_the_next_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    address = ipc_address(tmp_path)
    client = EngineClient(config(address))
    with FakeEngine(address, script=first_two):
        live = start(client)
        has_begun(client, live)
    with FakeEngine(address, script=answer_at_once, info=make_info(engine_id="next")) as second:
        wait(client, live)
        assert second.next_request().output.tolist() == IDS[:2]
        client.close()

    assert live.failure is None
    assert live.outputs[0].token_ids == IDS
    assert live.outputs[0].text == ANSWER
    assert "requests_continued" in caplog.text
    assert levels_of("connection_lost", caplog) == ["WARNING"]
    assert "count=1" in caplog.text


def test_a_client_that_was_cut_off_goes_on_with_the_same_engine(tmp_path: Path) -> None:
    with FakeEngine(ipc_address(tmp_path), script=first_two) as engine:
        client = EngineClient(config(engine.address))
        live = start(client)
        has_begun(client, live)
        engine.script = answer_at_once
        engine.send(Refusal(reason="too_slow", message="you read too slowly"))
        wait(client, live)
        client.close()

    assert live.outputs[0].text == ANSWER
    assert engine.num_hellos == 2


def test_what_no_engine_would_understand_is_not_said_again(tmp_path: Path) -> None:
    """A message that cannot be read would come again with the same tokens."""
    with FakeEngine(ipc_address(tmp_path), script=first_two) as engine:
        client = EngineClient(config(engine.address))
        live = start(client)
        has_begun(client, live)
        engine.send_bytes(b"\x00garbage")
        wait(client, live)
        client.close()

    assert isinstance(live.failure, EngineLost)


def test_waiting_for_another_engine_ends_after_recovery_s(tmp_path: Path) -> None:
    address = ipc_address(tmp_path)
    client = EngineClient(config(address, recovery_s=0.3))
    with FakeEngine(address, script=first_two):
        live = start(client)
        has_begun(client, live)
    wait(client, live)
    client.close()

    assert isinstance(live.failure, EngineLost)
    assert "No engine went on with it within recovery_s=0.3" in str(live.failure)
    assert live.outputs[0].token_ids == IDS[:2]


def test_nobody_waits_for_a_cluster_that_has_ended(tmp_path: Path) -> None:
    address = ipc_address(tmp_path)
    is_over = threading.Event()
    client = EngineClient(config(address), is_over=is_over.is_set)
    with FakeEngine(address, script=first_two):
        live = start(client)
        has_begun(client, live)
    is_over.set()
    wait(client, live)
    client.close()

    assert isinstance(live.failure, EngineLost)
    assert "the cluster has ended" in str(live.failure)


def test_closing_ends_what_waits_for_an_engine(tmp_path: Path) -> None:
    address = ipc_address(tmp_path)
    client = EngineClient(config(address))
    with FakeEngine(address, script=first_two):
        live, other = start(client), start(client)
        has_begun(client, live)
    client.cancel(other)
    client.close()

    assert other.outputs[0].finish is Finish.ABORT
    assert isinstance(live.failure, ClientClosed)


# --- the same on a loop -----------------------------------------------------------------------


def play(scene: Callable[[LoopClient], Awaitable[None]], address: str, **fields: object) -> None:
    async def run() -> None:
        client = LoopClient(config(address, **fields))
        client.start()
        try:
            async with asyncio.timeout(30):
                await scene(client)
        finally:
            await client.close()

    asyncio.run(run())


async def begin(client: LoopClient) -> LiveRequest:
    live = await start_on_loop(client)
    while len(live.outputs[0].token_ids) < 2:
        await asyncio.sleep(0.001)
    return live


def test_on_a_loop_too_a_request_goes_on_with_the_next_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    address = ipc_address(tmp_path)

    async def scene(client: LoopClient) -> None:
        with FakeEngine(address, script=first_two) as first:
            live = await begin(client)
            await from_thread(first.close)
        with FakeEngine(address, script=answer_at_once, info=make_info(engine_id="next")) as second:
            await wait_on_loop(live)
            assert (await from_thread(second.next_request)).output.tolist() == IDS[:2]
        assert live.failure is None
        assert live.outputs[0].token_ids == IDS
        assert live.outputs[0].text == ANSWER

    play(scene, address)
    assert "requests_continued" in caplog.text


def test_on_a_loop_too_waiting_ends_after_recovery_s(tmp_path: Path) -> None:
    address = ipc_address(tmp_path)

    async def scene(client: LoopClient) -> None:
        with FakeEngine(address, script=first_two) as first:
            live = await begin(client)
            await from_thread(first.close)
        assert client.num_live == 1
        await wait_on_loop(live)
        assert isinstance(live.failure, EngineLost)
        assert "recovery_s=0.3" in str(live.failure)
        assert client.num_live == 0

    play(scene, address, recovery_s=0.3)


def test_on_a_loop_too_closing_ends_what_waits(tmp_path: Path) -> None:
    address = ipc_address(tmp_path)
    lives: list[LiveRequest] = []

    async def scene(client: LoopClient) -> None:
        with FakeEngine(address, script=first_two) as first:
            lives.extend([await begin(client), await begin(client)])
            await from_thread(first.close)
        while client.info is not None:
            await asyncio.sleep(0.001)
        client.cancel(lives[0])

    play(scene, address)

    assert lives[0].outputs[0].finish is Finish.ABORT
    assert isinstance(lives[1].failure, ClientClosed)
