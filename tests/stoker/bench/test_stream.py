"""Answers, taken in as they arrive."""

import pytest

from stoker.bench.stream import Reply
from tests.stoker.bench.scripted_server import DONE, Answer, event, stream_of, text_chunk, usage
from tests.stoker.bench.scripted_server import usage_chunk as usage_event


def fed(*pieces: tuple[float, bytes], status: int = 200, is_whole: bool = True) -> Reply:
    reply = Reply()
    reply.head(status, {})
    for now, data in pieces:
        reply.feed(data, now)
    if is_whole:
        reply.end()
    return reply


def body_of(answer: Answer) -> bytes:
    return b"".join(data for _, data in answer.pieces)


def chat_chunk(finish: str | None = None, **delta: object) -> bytes:
    return event(choices=[{"index": 0, "delta": delta, "finish_reason": finish}], usage=None)


def test_chunks_are_noted_when_they_come_and_tokens_are_those_of_the_usage() -> None:
    reply = fed(
        (1.0, text_chunk("a")),
        (2.0, text_chunk("b") + text_chunk("c")),
        (3.0, text_chunk("d", "length")),
        (4.0, usage_event(7, 9, 2) + DONE),
    )

    assert reply.chunk_s == [1.0, 2.0, 2.0, 3.0]
    assert reply.choice_s == 3.0
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (7, 9)
    assert reply.failure is None


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_a_body_may_be_cut_anywhere(size: int, line_end: bytes) -> None:
    body = body_of(stream_of([0, 0, 0], tokens=5)).replace(b"\n", line_end)
    pieces = [(0.0, body[i : i + size]) for i in range(0, len(body), size)]

    reply = fed(*pieces)

    assert len(reply.chunk_s) == 3
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 5
    assert reply.failure is None


def test_the_role_of_a_chat_is_no_token() -> None:
    reply = fed(
        (1.0, chat_chunk(role="assistant", content="")),
        (5.0, chat_chunk(content="hi")),
        (6.0, chat_chunk("stop")),
        (6.0, usage_event(3, 1) + DONE),
    )

    assert reply.token_times() == [5.0]
    assert reply.choice_s == 6.0


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
        {"refusal": "no"},
    ],
)
def test_whatever_a_model_makes_counts_as_content(delta: dict[str, object]) -> None:
    assert fed((1.0, chat_chunk(**delta))).chunk_s == [1.0]


def test_an_end_token_without_text_has_the_time_of_the_end() -> None:
    reply = fed(
        (1.0, text_chunk("a")),
        (2.0, text_chunk("b")),
        (3.0, text_chunk("", "stop")),
        (3.0, usage_event(4, 3)),
    )

    assert reply.token_times() == [1.0, 2.0, 3.0]


def test_an_end_told_apart_from_the_last_token_is_no_token() -> None:
    reply = fed(
        (1.0, text_chunk("a")),
        (2.0, text_chunk("b")),
        (3.0, text_chunk("", "length")),
        (3.0, usage_event(4, 2)),
    )

    assert reply.token_times() == [1.0, 2.0]


def test_tokens_that_are_no_text_at_all_came_when_the_answer_ended() -> None:
    reply = fed((2.0, text_chunk("", "stop")), (2.0, usage_event(4, 1) + DONE))

    assert reply.token_times() == [2.0]
    assert reply.failure is None


def test_a_running_usage_says_how_many_tokens_each_chunk_brought() -> None:
    reply = fed(
        (1.0, text_chunk("a", usage=usage(4, 2))),
        (2.0, text_chunk("b", "length", usage=usage(4, 6))),
    )

    assert reply.chunk_tokens == [2, 6]


def test_lines_that_are_no_data_are_left() -> None:
    body = b": keep-alive\n\nevent: x\nid: 3\n" + body_of(stream_of([0]))

    assert fed((0.0, body)).failure is None


@pytest.mark.parametrize(
    ("reply", "failure"),
    [
        (Reply(), "no answer"),
        (fed((0.0, b'{"error": 1}'), status=503), "HTTP 503"),
        (fed((0.0, event(error={"message": "died"}))), "error in the stream"),
        (fed((0.0, b'{"choices": [{"text": "all at once"}]}\n')), "not a stream"),
        (fed((0.0, b"data: {nonsense\n\n")), "unreadable chunk"),
        (fed((0.0, text_chunk("a"))), "stream cut off"),
        (fed((0.0, text_chunk("a", "length")), is_whole=False), "stream cut off"),
        (fed((0.0, text_chunk("a", "abort"))), "finish_reason abort"),
        (fed((0.0, text_chunk("a", "length") + DONE), is_whole=False), None),
        (fed((0.0, event(error=None, choices=[]) + text_chunk("a", "stop"))), None),
    ],
)
def test_an_answer_that_is_not_whole_is_a_failure_with_its_reason(
    reply: Reply, failure: str | None
) -> None:
    assert reply.failure == failure


def test_a_refusal_keeps_when_to_come_again_and_what_was_said() -> None:
    reply = Reply()
    reply.head(429, {"retry-after": "2.5"})
    reply.feed(b'{"error": ', 0.0)
    reply.feed(b'"full"}', 0.0)

    assert reply.retry_after_s == 2.5
    assert reply.error_text == '{"error": "full"}'


def test_a_date_in_retry_after_is_left() -> None:
    reply = Reply()
    reply.head(429, {"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"})

    assert reply.retry_after_s is None
