"""What all chunks of one stream have around their choices, encoded once."""

import msgspec
from msgspec import Struct

from cluster.api.calls import Call
from cluster.api.errors import ApiError
from cluster.api.openai.generation_body import GenerationBody
from cluster.api.openai.usage import usage_of
from cluster.api.position import Marks, Position
from cluster.api.sse import DONE

_ENCODER = msgspec.json.Encoder()


class ChunkFrame:
    """Makes events of one call, in OpenAI's envelope."""

    def __init__(
        self,
        call: Call,
        body: GenerationBody,
        *,
        kind: str,
        created: int,
        model: str,
        marks: Marks | None = None,
    ) -> None:
        """
        Args:
            kind: what the envelope's `object` says.
            marks: the ids of events, if the stream can be resumed.
        """
        envelope = _ENCODER.encode(
            {"id": call.id, "object": kind, "created": created, "model": model}
        )
        self._head = b"data: " + envelope[:-1] + b',"choices":['
        self._call = call
        self._marks = marks
        self._has_usage = body.wants_usage_chunk
        self._has_usage_always = body.wants_usage_always
        self._tail = b'],"usage":null}\n\n' if self._has_usage else b"]}\n\n"

    def event(self, choice: Struct) -> bytes:
        """One chunk with one choice."""
        tail = self._usage_tail() if self._has_usage_always else self._tail
        event = b"".join((self._head, _ENCODER.encode(choice), tail))
        return event if self._marks is None else self._marks.line() + event

    def skip(self, position: Position) -> None:
        """The reader has what comes up to there."""
        self._has_usage = self._has_usage and not position.has_closing

    def closing(self, *, is_scoring: bool = False) -> bytes:
        """What ends the stream: the usage, if asked for, and the mark of the end."""
        if not self._has_usage:
            return DONE
        usage = self._head + self._usage_tail(is_scoring=is_scoring)
        return b"".join((b"" if self._marks is None else self._marks.line("-u"), usage, DONE))

    def failing(self, error: ApiError) -> bytes:
        """Without the mark of the end, so that nobody takes it for a whole answer."""
        return b"data: " + error.body() + b"\n\n"

    def _usage_tail(self, *, is_scoring: bool = False) -> bytes:
        usage = _ENCODER.encode(usage_of(self._call, is_scoring=is_scoring))
        return b'],"usage":' + usage + b"}\n\n"
