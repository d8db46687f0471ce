"""Answers of an OpenAI-compatible server by a script: chunks and the pauses before them."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from stoker.bench.stream import Listener

Body = dict[str, object]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, by either fake."""

    pieces: Sequence[tuple[float, bytes]] = ()
    """Seconds to wait before each piece of the body, and the piece."""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    is_cut: bool = False
    """Whether the connection is closed instead of the body being ended."""


Script = Callable[[Body, int], Answer]
"""What is answered to a body, which is the n-th from 0."""


def event(**fields: object) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


def text_chunk(text: str, finish: str | None = None, **fields: object) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish}], **fields)


def usage(prompt: int, output: int, cached: int | None = None) -> Body:
    found: Body = {"prompt_tokens": prompt, "completion_tokens": output}
    if cached is not None:
        found["prompt_tokens_details"] = {"cached_tokens": cached}
    return found


def usage_chunk(prompt: int, output: int, cached: int | None = None) -> bytes:
    return event(choices=[], usage=usage(prompt, output, cached))


DONE = b"data: [DONE]\n\n"


def stream_of(
    delays_s: Sequence[float],
    *,
    tokens: int | None = None,
    prompt: int = 10,
    cached: int | None = None,
    finish: str = "length",
) -> Answer:
    """One chunk with text after each delay, then the usage.

    Args:
        tokens: that the usage tells of; by default one for each chunk.
    """
    last = len(delays_s) - 1
    pieces = [
        (delay_s, text_chunk(f" w{i}", finish if i == last else None))
        for i, delay_s in enumerate(delays_s)
    ]
    counted = len(delays_s) if tokens is None else tokens
    pieces.append((0.0, usage_chunk(prompt, counted, cached)))
    return Answer([*pieces, (0.0, DONE)])


def refusal(status: int, text: str = "no", **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    body = json.dumps({"error": {"message": text}}).encode()
    return Answer([(0.0, body)], status, named)


class ScriptedServer:
    """Stands in for `HttpClient.post`: no sockets, and its loop's own time."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.bodies: list[Body] = []

    async def post(self, body: bytes, listener: Listener) -> None:
        now = asyncio.get_running_loop().time
        self.bodies.append(json.loads(body))
        answer = self.script(self.bodies[-1], len(self.bodies) - 1)
        for i, (delay_s, data) in enumerate(answer.pieces):
            if delay_s:
                await asyncio.sleep(delay_s)
            if i == 0:
                listener.head(answer.status, answer.headers)
            listener.feed(data, now())
        if answer.is_cut:
            raise ConnectionResetError("cut")
        listener.end()
