"""How much of a streamed answer its reader has: the ids of events, and `Last-Event-ID`.

An id counts the tokens of each output, not events: how tokens share events depends on who was
slow, so an answer that is computed again is cut elsewhere, while its tokens are the same. A
checksum of those tokens tells if they are not.
"""

import re
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.api.errors import DIVERGED, ApiError, bad_request

LAST_EVENT_ID = "Last-Event-ID"

_ID = re.compile(
    r"([0-9a-f]{1,12})-([0-9a-f]{1,8})-([0-9e_]{0,4096})"
    r"(?:-s([0-9]{1,9}e?)p([0-9]{1,9}))?(?:-n([0-9]{1,9}))?(-u)?"
)
_PLACE = re.compile(r"([0-9]{1,9})(e?)")


@dataclass(frozen=True, slots=True)
class Place:
    """How much of one output."""

    num_tokens: int
    has_ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """An id, read."""

    created: int
    """What the stream's chunks say of when it was made."""
    checksum: int
    places: tuple[Place | None, ...]
    """Of each output; None: nothing of it."""
    split: tuple[Place, int] | None = None
    """Of an answer with one output: the growth from its place to this one makes several events,
    of which the reader has so many."""
    num_events: int = 0
    """Of the stream up to here, where events are numbered."""
    has_closing: bool = False
    """Whether what follows the ends of all outputs is there too."""

    @property
    def reached(self) -> tuple[Place | None, ...]:
        """What must have been computed before a stream can go on from here."""
        return self.places if self.split is None else (self.split[0],)

    @classmethod
    def parse(cls, text: str) -> "Position":
        """
        Raises:
            ApiError: 400, no stream has such an id.
        """
        found = _ID.fullmatch(text)
        if found is None:
            raise bad_request(
                f"{LAST_EVENT_ID} must be the id of an event of the stream that is to go on, "
                f"got {text!r:.80}",
                LAST_EVENT_ID,
            )
        created, checksum, places, towards, num_parts, number, closing = found.groups()
        split = None if towards is None else (_place_of(towards), int(num_parts))
        return cls(
            created=int(created, 16),
            checksum=int(checksum, 16),
            places=tuple(_place_of(each) if each else None for each in places.split("_")),
            split=split,
            num_events=0 if number is None else int(number),
            has_closing=closing is not None,
        )


def _place_of(text: str) -> Place:
    found = _PLACE.fullmatch(text)
    if found is None:
        raise bad_request(f"{LAST_EVENT_ID} has no place {text!r:.20}", LAST_EVENT_ID)
    return Place(int(found[1]), bool(found[2]))


@dataclass(slots=True)
class Marks:
    """Makes the ids of one stream's events, from what has been written of each output."""

    created: int
    num_outputs: int
    _places: list[str] = field(init=False)
    _counts: list[int] = field(init=False)
    _checksums: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._places = [""] * self.num_outputs
        self._counts = [0] * self.num_outputs
        self._checksums = [0] * self.num_outputs

    def begin(self, index: int) -> None:
        """An output has been begun with, though none of its tokens is out."""
        self._places[index] = self._places[index] or "0"

    def advance(self, index: int, token_ids: Sequence[int], *, has_ended: bool) -> None:
        """More of an output is out."""
        count = self._counts[index] = self._counts[index] + len(token_ids)
        self._checksums[index] = zlib.crc32(array("i", token_ids), self._checksums[index])
        self._places[index] = f"{count}e" if has_ended else str(count)

    @property
    def place(self) -> str:
        """Of all outputs."""
        return "_".join(self._places)

    def line(self, suffix: str = "", *, place: str | None = None) -> bytes:
        """The field of an event that says where its reader is after it."""
        where = self.place if place is None else place
        return f"id: {self.created:x}-{self._checksum:x}-{where}{suffix}\n".encode()

    @property
    def _checksum(self) -> int:
        return sum(self._checksums) & 0xFFFFFFFF

    def check(self, position: Position) -> None:
        """What was passed over must be what the reader has.

        Raises:
            ApiError: 410, it is not.
        """
        if self._checksum != position.checksum:
            raise ApiError(
                "the stream cannot go on: its answer had to be computed again, and came out "
                f"differently within the {sum(self._counts)} tokens that were delivered. Ask again "
                "under another Idempotency-Key",
                DIVERGED,
                param=LAST_EVENT_ID,
            )
