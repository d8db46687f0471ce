"""What surrounds a body, and the body itself, are bounded in size and in time: case 126."""

import time
from collections.abc import Iterator

import psutil
import pytest

from tests.cluster.api.raw import Answer, Raw, head
from tests.cluster.api.rig import ApiRig
from tests.cluster.frontend.fake_engine import answer_at_once

JSON = "Content-Type: application/json"
BODY = b'{"prompt": [5], "max_tokens": 2}'
MANY = 64 << 20
"""More than would ever be kept."""


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiRig]:
    with ApiRig(
        tmp_path_factory.mktemp("limits"),
        script=answer_at_once,
        max_body_bytes=10_000,
        max_header_bytes=4_000,
        max_header_count=20,
        read_timeout_s=0.5,
    ) as rig:
        yield rig


@pytest.fixture(autouse=True)
def _serves_on_in_no_more_memory(rig: ApiRig) -> Iterator[None]:
    process = psutil.Process()
    before = process.memory_info().rss
    yield
    assert rig.post("/v1/completions", prompt=[5], max_tokens=2).status_code == 200
    assert process.memory_info().rss - before < MANY // 2


def error_of(answer: Answer | None, status: int) -> dict[str, object]:
    assert answer is not None
    assert answer.status == status
    assert answer.headers["connection"] == "close"
    return answer.error()


def body_of(size: int) -> bytes:
    return BODY[:-1] + b" " * (size - len(BODY)) + b"}"


def test_a_body_of_the_largest_size_is_taken(rig: ApiRig) -> None:
    with Raw(rig.url) as raw:
        raw.send(head("/v1/completions", JSON, "Content-Length: 10000") + body_of(10_000))
        answer = raw.answer()
        assert answer is not None
        assert answer.status == 200


def test_a_body_that_is_said_to_be_larger_is_refused_before_it_is_sent(rig: ApiRig) -> None:
    with Raw(rig.url) as raw:
        raw.send(head("/v1/completions", JSON, "Content-Length: 10001"))
        error = error_of(raw.answer(), 413)
    assert error["code"] == "body_too_large"
    assert "10000 bytes (max_body_bytes), this one is 10001 bytes" in str(error["message"])


def test_a_body_in_chunks_that_grows_larger_is_refused(rig: ApiRig) -> None:
    with Raw(rig.url) as raw:
        raw.send(head("/v1/completions", JSON, "Transfer-Encoding: chunked"))
        chunk = b"400\r\n" + b" " * 0x400 + b"\r\n"
        assert raw.send_until_closed(chunk, MANY) < MANY
        answer = raw.answer()
    assert answer is None or error_of(answer, 413)["code"] == "body_too_large"


def test_a_body_that_never_ends_is_given_up(rig: ApiRig) -> None:
    began = time.monotonic()
    with Raw(rig.url) as raw:
        raw.send(head("/v1/completions", JSON, "Content-Length: 500") + BODY)
        error = error_of(raw.answer(), 408)
    assert time.monotonic() - began >= 0.5
    assert f"read_timeout_s=0.5; {len(BODY)} bytes were" in str(error["message"])


def test_a_body_of_tiny_chunks_is_a_body(rig: ApiRig) -> None:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY)
    with Raw(rig.url) as raw:
        raw.send(head("/v1/completions", JSON, "Transfer-Encoding: chunked"))
        raw.send(chunks + b"0\r\n\r\n")
        answer = raw.answer()
        assert answer is not None
        assert answer.status == 200


def test_chunks_that_are_all_frame_are_refused(rig: ApiRig) -> None:
    with Raw(rig.url) as raw:
        raw.send(head("/v1/completions", JSON, "Transfer-Encoding: chunked"))
        raw.send(b"1;")
        assert raw.send_until_closed(b"x" * 65536, MANY) < MANY


def test_trailers_that_never_end_are_refused(rig: ApiRig) -> None:
    with Raw(rig.url) as raw:
        raw.send(head("/v1/models", "Transfer-Encoding: chunked", method="GET") + b"0\r\n")
        assert raw.send_until_closed(b"x-one: " + b"y" * 1000 + b"\r\n", MANY) < MANY


def test_too_many_headers_are_refused(rig: ApiRig) -> None:
    with Raw(rig.url) as raw:
        raw.send(head("/v1/models", *(f"X-{n}: y" for n in range(19)), method="GET"))
        answer = raw.answer()
        assert answer is not None
        assert answer.status == 200
        raw.send(head("/v1/models", *(f"X-{n}: y" for n in range(20)), method="GET"))
        error = error_of(raw.answer(), 431)
    assert "20 headers (max_header_count)" in str(error["message"])


@pytest.mark.parametrize("where", ["path", "name", "value", "several"])
def test_headers_that_are_too_large_are_refused(rig: ApiRig, where: str) -> None:
    large = "x" * 5_000
    lines = {
        "path": head(f"/v1/models?{large}", method="GET"),
        "name": head("/v1/models", f"{large}: y", method="GET"),
        "value": head("/v1/models", f"X: {large}", method="GET"),
        "several": head("/v1/models", *(f"X-{n}: {large[:1000]}" for n in range(5)), method="GET"),
    }
    with Raw(rig.url) as raw:
        raw.send(lines[where])
        error = error_of(raw.answer(), 431)
    assert "4000 bytes (max_header_bytes)" in str(error["message"])


@pytest.mark.parametrize("start", [b"GET /", b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\nX"])
def test_a_head_that_never_ends_is_refused_long_before_it_is_kept(
    rig: ApiRig, start: bytes
) -> None:
    with Raw(rig.url) as raw:
        raw.send(start)
        assert raw.send_until_closed(b"x" * 65536, MANY) < MANY


@pytest.mark.parametrize("start", [b"", b"G", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nX: y"])
def test_a_head_that_does_not_come_is_given_up(rig: ApiRig, start: bytes) -> None:
    with Raw(rig.url) as raw:
        raw.send(start)
        error = error_of(raw.answer(), 408)
    assert "read_timeout_s=0.5" in str(error["message"])


@pytest.mark.parametrize(
    ("sent", "status", "reason"),
    [
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 5_000 + b"\r\n\r\n", 431, "max_header_bytes"),
        (b"G", 408, "read_timeout_s=0.5"),
        (b"\x16\x03\x01\x02\x00\x01", 400, "this is not HTTP/1.1"),
    ],
    ids=["large", "late", "not HTTP"],
)
def test_what_is_refused_before_it_is_a_call_is_logged_too(
    rig: ApiRig, caplog: pytest.LogCaptureFixture, sent: bytes, status: int, reason: str
) -> None:
    with caplog.at_level("INFO", "stoker.api"), Raw(rig.url) as raw:
        raw.send(sent)
        error_of(raw.answer(), status)
    (line,) = [line for line in caplog.messages if line.startswith("connection_refused")]
    assert f"client=127.0.0.1 status={status}" in line
    assert reason in line


def test_a_second_head_that_does_not_come_is_given_up(rig: ApiRig) -> None:
    with Raw(rig.url) as raw:
        raw.send(head("/v1/models", method="GET"))
        assert raw.answer() is not None
        raw.send(b"GET /v1/mod")
        error_of(raw.answer(), 408)


def test_requests_sent_ahead_are_answered_in_order(rig: ApiRig) -> None:
    with Raw(rig.url) as raw:
        post = head("/v1/completions", JSON, f"Content-Length: {len(BODY)}") + BODY
        raw.send(head("/v1/models", method="GET") + post + head("/no", method="GET") + b"GET /")
        statuses = [getattr(raw.answer(), "status", None) for _ in range(3)]
    assert statuses == [200, 200, 404]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,
        b"\x00" * 1000,
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_in_the_shape_of_all_errors(rig: ApiRig, garbage: bytes) -> None:
    with Raw(rig.url) as raw:
        raw.send(garbage)
        answer = raw.answer()
        assert answer is None or error_of(answer, 400)["type"] == "invalid_request_error"
        assert raw.is_closed()
