"""What went into the scheduler and what it decided, one record per event; and its replay.

The scheduler is a function of its inputs (messages and times), so the inputs alone
reproduce it; the decisions are recorded too, so that a person can read why, and a replay
can prove that it decided the same. On disk: MessagePack maps, one after the other.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import TypeAlias

import msgspec
from msgspec import Struct

from scheduler.arrays import decode_column, encode_column
from scheduler.config import ModelLimits, SchedulerConfig
from scheduler.plan import StepResult
from scheduler.request import Finish, Request


class Opened(Struct, frozen=True, kw_only=True, tag_field="event", tag="opened"):
    """The first record: all that the scheduler was made of."""

    config: dict[str, int | float | str | bool]
    model: ModelLimits


class GroupAdded(Struct, frozen=True, kw_only=True, tag_field="event", tag="group_added"):
    now: float
    group: int
    epoch: int
    num_blocks: int


class GroupDrained(Struct, frozen=True, kw_only=True, tag_field="event", tag="group_drained"):
    now: float
    group: int
    drains: bool
    """False: it takes part again."""


class GroupLost(Struct, frozen=True, kw_only=True, tag_field="event", tag="group_lost"):
    now: float
    group: int
    failure: str = ""
    """What went wrong; empty: no request can have caused it."""


class Submitted(Struct, frozen=True, kw_only=True, tag_field="event", tag="submitted"):
    now: float
    client: int
    request: Request
    refused: str | None
    """The rejection's reason; None if the request was accepted."""


class Aborted(Struct, frozen=True, kw_only=True, tag_field="event", tag="aborted"):
    now: float
    client: int
    handles: list[int] | None
    """None: every request of the client."""


class Expired(Struct, frozen=True, kw_only=True, tag_field="event", tag="expired"):
    """Requests that were ended from outside: late, or beyond hope."""

    now: float
    serials: list[int]
    finish: Finish
    message: str


class Planned(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event", tag="planned"
):
    """One step as it was decided."""

    now: float
    group: int
    epoch: int
    step: int
    """0: nothing could run, but sequences were preempted."""
    decode_tokens: int
    prefill_tokens: int
    num_running: int
    num_waiting: int
    idle_blocks: int
    predicted_s: float
    checksum: int
    """CRC-32 of the plan's columns."""
    admitted: list[int] = []
    """Serials that took a slot, in order."""
    preempted: list[int] = []
    deferred: dict[int, str] = {}
    """Serials that could have been next and were not, and why: blocks, prefix, group,
    suspect (another one that may have made a group fail must be alone in this one)."""


class Applied(Struct, frozen=True, kw_only=True, tag_field="event", tag="applied"):
    now: float
    group: int
    result: StepResult
    finished: list[int]
    """Serials that ended with this step."""


Record: TypeAlias = (
    Opened
    | GroupAdded
    | GroupDrained
    | GroupLost
    | Submitted
    | Aborted
    | Expired
    | Planned
    | Applied
)

Journal: TypeAlias = Callable[[Record], None]
"""Takes each record as it happens; must not fail and must not block."""

_encoder = msgspec.msgpack.Encoder(enc_hook=encode_column)
_decoder: "msgspec.msgpack.Decoder[Record]" = msgspec.msgpack.Decoder(
    Record, dec_hook=decode_column
)


def encode_record(record: Record) -> bytes:
    return _encoder.encode(record)


def decode_record(data: bytes) -> Record:
    """Raises msgspec.ValidationError for anything that is not a record."""
    return _decoder.decode(data)


def opened(config: SchedulerConfig, model: ModelLimits) -> Opened:
    return Opened(config=asdict(config), model=model)
