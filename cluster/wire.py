"""Messages as bytes: typed MessagePack maps, one frame each, within a size limit.

Never pickle: a frame can only become one of the types of its direction, or a `WireError`.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct

from cluster.errors import WireError
from cluster.messages.sockets import FromClient, FromEngine, ToClient, ToEngine
from scheduler.arrays import decode_column, encode_column

PROTOCOL_VERSION = 3
"""Rises when a message changes meaning. Both ends must have the same."""

MIB = 1 << 20

Sent = TypeVar("Sent")


@dataclass(frozen=True, slots=True)
class Channel(Generic[Sent]):
    """One direction of one socket: which messages may pass, and how large they may be."""

    name: str
    """For errors: who speaks to whom."""
    max_bytes: int
    """Of one message. The sender checks it; a receiver drops the sender of a larger one."""
    _encoder: msgspec.msgpack.Encoder
    _decoder: msgspec.msgpack.Decoder[Sent]

    def encode(self, message: Sent) -> bytes:
        """The message as one frame.

        Raises:
            WireError: it is larger than `max_bytes`.
        """
        frame = self._encoder.encode(message)
        if len(frame) > self.max_bytes:
            raise WireError(
                f"a {type(message).__name__} of {len(frame)} bytes {self.name} is over the limit "
                f"of {self.max_bytes} bytes per message. Send less at a time"
            )
        return frame

    def decode(self, frame: bytes) -> Sent:
        """The message in a frame.

        Raises:
            WireError: too large, not MessagePack, not a message of this channel, or one with a
                missing, wrong or impossible field; the text says which.
        """
        if len(frame) > self.max_bytes:
            raise WireError(
                f"{len(frame)} bytes {self.name} are over the limit of {self.max_bytes} bytes "
                "per message"
            )
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            raise WireError(f"not a message {self.name}: {error}") from error


def _channel(name: str, max_bytes: int, union: type[Sent]) -> Channel[Sent]:
    return Channel(
        name,
        max_bytes,
        msgspec.msgpack.Encoder(enc_hook=encode_column),
        msgspec.msgpack.Decoder(union, dec_hook=decode_column),
    )


# mypy has no type of a union, so each line is told which union the channel carries.
FROM_CLIENT: Channel[FromClient] = _channel(
    "from a client to the engine",
    16 * MIB,
    FromClient,  # type: ignore[arg-type]
)
TO_CLIENT: Channel[ToClient] = _channel(
    "from the engine to a client",
    64 * MIB,
    ToClient,  # type: ignore[arg-type]
)
TO_ENGINE: Channel[ToEngine] = _channel(
    "from a worker or the supervisor to the engine",
    64 * MIB,
    ToEngine,  # type: ignore[arg-type]
)
FROM_ENGINE: Channel[FromEngine] = _channel(
    "from the engine to a worker or the supervisor",
    64 * MIB,
    FromEngine,  # type: ignore[arg-type]
)


class RequestHead(Struct, frozen=True, tag_field="type", tag="request"):
    """The one field of a request by which its sender can be answered."""

    handle: int


_HEADS = msgspec.msgpack.Decoder(RequestHead)


def handle_of(frame: bytes) -> int | None:
    """The handle of a request that could not be read as a whole; None if there is none."""
    try:
        return _HEADS.decode(frame).handle
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        return None
