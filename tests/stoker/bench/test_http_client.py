"""The client of loads, on real sockets."""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from time import monotonic

import pytest

from stoker.bench.http_client import BadAddress, HttpClient, ServerClosed
from stoker.bench.stream import Clock, Reply
from tests.stoker.bench.http_server import HttpServer
from tests.stoker.bench.scripted_server import Answer, refusal, stream_of, text_chunk


def talk(
    url: str,
    use: Callable[[HttpClient], Coroutine[None, None, None]],
    clock: Clock = monotonic,
    **headers: str,
) -> None:
    async def main() -> None:
        client = HttpClient(url, headers=headers, clock=clock)
        try:
            await use(client)
        finally:
            client.close()
            await asyncio.sleep(0)  # lets the transports close

    asyncio.run(main())


def answers(
    url: str, count: int = 1, at_once: bool = False, clock: Clock = monotonic, **headers: str
) -> list[Reply]:
    replies = [Reply() for _ in range(count)]

    async def ask(client: HttpClient) -> None:
        posts = [client.post("/v1/completions", b'{"a": 1}', reply) for reply in replies]
        if at_once:
            await asyncio.gather(*posts)
        else:
            for post in posts:
                await post

    talk(url, ask, clock, **headers)
    return replies


def tokens(*_: object) -> Answer:
    return stream_of([0, 0, 0], tokens=5)


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
def test_an_answer_is_whole_however_its_end_is_told(framing: str) -> None:
    with HttpServer(tokens, framing=framing) as server:
        (reply,) = answers(server.url)

    assert reply.failure is None
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 5
    assert len(reply.chunk_s) == 3


def test_a_request_brings_its_headers_and_its_body() -> None:
    with HttpServer(tokens) as server:
        answers(server.url, authorization="Bearer k")

    (asked,) = server.asked
    assert (asked.method, asked.path, asked.body) == ("POST", "/v1/completions", {"a": 1})
    assert asked.headers["authorization"] == "Bearer k"
    assert asked.headers["content-type"] == "application/json"
    assert asked.headers["host"] == server.url.removeprefix("http://")


def test_a_path_of_the_base_url_comes_before_the_route() -> None:
    with HttpServer(tokens) as server:
        answers(f"{server.url}/behind/a/proxy/")

    assert server.asked[0].path == "/behind/a/proxy/v1/completions"


def test_one_connection_serves_requests_that_follow_each_other() -> None:
    with HttpServer(tokens) as server:
        replies = answers(server.url, 5)

    assert all(reply.failure is None for reply in replies)
    assert server.num_connections == 1


def test_requests_at_once_have_connections_of_their_own() -> None:
    with HttpServer(tokens) as server:
        replies = answers(server.url, 4, at_once=True)

    assert all(reply.failure is None for reply in replies)
    assert server.num_connections == 4


def test_a_connection_closed_while_it_was_idle_for_long_is_replaced_unnoticed() -> None:
    ten_seconds_on = iter(range(0, 10_000, 10))
    with HttpServer(tokens) as server:
        server.closes_after = 1
        replies = answers(server.url, 4, clock=lambda: float(next(ten_seconds_on)))

    assert [reply.failure for reply in replies] == [None] * 4
    assert server.num_connections == 4


def test_a_server_that_hangs_up_on_a_request_has_failed_it() -> None:
    """Asking again would hide it: the connection was in use a moment ago."""

    def hang_up(_: object, i: int) -> Answer:
        return Answer(is_cut=True) if i == 1 else tokens()

    with HttpServer(hang_up, framing="length") as server, pytest.raises(ServerClosed):
        answers(server.url, 2, clock=lambda: 0.0)

    assert len(server.asked) == 2


def test_an_answer_cut_in_its_middle_is_an_error_and_not_asked_for_again() -> None:

    cut = Answer([(0.0, text_chunk("a"))], is_cut=True)
    with HttpServer(lambda *_: cut) as server, pytest.raises(ServerClosed):
        answers(server.url)

    assert len(server.asked) == 1


def test_an_error_has_its_status_its_headers_and_its_text() -> None:
    with HttpServer(lambda *_: refusal(429, "full", Retry_After="7")) as server:
        (reply,) = answers(server.url)

    assert (reply.status, reply.retry_after_s) == (429, 7.0)
    assert "full" in reply.error_text


def test_where_nobody_listens_there_is_no_connection() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConnectionRefusedError):
            answers(url)


def test_what_is_not_http_is_an_error() -> None:
    async def main() -> None:
        async def babble(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"SSH-2.0-x\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(babble, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            client = HttpClient(f"http://{host}:{port}", clock=monotonic)
            with pytest.raises(ConnectionError, match="not HTTP"):
                await client.post("/", b"{}", Reply())
            client.close()

    asyncio.run(main())


def test_a_cancelled_request_closes_its_connection() -> None:
    async def main() -> bytes:
        heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n{}")
            sender.cancel()
            heard.set_result(await reader.read())
            writer.close()

        async with await asyncio.start_server(hold, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            client = HttpClient(f"http://{host}:{port}", clock=monotonic)
            sender = asyncio.create_task(client.post("/", b"{}", Reply()))
            with pytest.raises(asyncio.CancelledError):
                await sender
            return await heard

    assert asyncio.run(asyncio.wait_for(main(), 20)) == b""


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "tcp://127.0.0.1:1"])
def test_an_address_of_no_web_server_is_refused(url: str) -> None:
    with pytest.raises(BadAddress, match="like http"):
        HttpClient(url, clock=monotonic)
