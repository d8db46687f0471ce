"""What all chunks of one stream have around their choices, encoded once."""

import msgspec
from msgspec import Struct

from cluster.api.calls import Call
from cluster.api.errors import ApiError
from cluster.api.openai.generation_body import GenerationBody
from cluster.api.openai.usage import usage_of
from cluster.api.sse import DONE

_ENCODER = msgspec.json.Encoder()


class ChunkFrame:
    """Makes events of one call, in OpenAI's envelope."""

    def __init__(
        self, call: Call, body: GenerationBody, *, kind: str, created: int, model: str
    ) -> None:
        """
        Args:
            kind: what the envelope's `object` says.
        """
        envelope = _ENCODER.encode(
            {"id": call.id, "object": kind, "created": created, "model": model}
        )
        self._head = b"data: " + envelope[:-1] + b',"choices":['
        self._call = call
        self._has_usage = body.wants_usage_chunk
        self._has_usage_always = body.wants_usage_always
        self._tail = b'],"usage":null}\n\n' if self._has_usage else b"]}\n\n"

    def event(self, choice: Struct) -> bytes:
        """One chunk with one choice."""
        tail = self._usage_tail() if self._has_usage_always else self._tail
        return b"".join((self._head, _ENCODER.encode(choice), tail))

    def closing(self, *, is_scoring: bool = False) -> bytes:
        """What ends the stream: the usage, if asked for, and the mark of the end."""
        if not self._has_usage:
            return DONE
        return self._head + self._usage_tail(is_scoring=is_scoring) + DONE

    def failing(self, error: ApiError) -> bytes:
        """Without the mark of the end, so that nobody takes it for a whole answer."""
        return b"data: " + error.body() + b"\n\n"

    def _usage_tail(self, *, is_scoring: bool = False) -> bytes:
        usage = _ENCODER.encode(usage_of(self._call, is_scoring=is_scoring))
        return b'],"usage":' + usage + b"}\n\n"
