"""What is said between a front end and the process that checks its grammars.

Frames on a pipe: four bytes of length, then MessagePack. First `Limits`, then tokenizer.json as
it is, answered by an empty verdict; then any number of jobs, each answered by a verdict.
"""

import struct
from typing import BinaryIO

from msgspec import Struct

from scheduler.structured import StructuredOutputs

_LENGTH = struct.Struct("<I")


class Limits(Struct, frozen=True, kw_only=True):
    """What one grammar may cost before it is used."""

    wall_s: float = 3.0
    """Until the process is ended, whatever it does. More: a hostile grammar holds up the other
    guided requests of this front end for longer."""
    build_s: float = 0.5
    """CPU seconds of building it and of the first mask, which workers then spend as well. More:
    streams that run beside it on a worker stutter for longer."""
    memory_bytes: int = 512 * 2**20
    """That the process may grow by."""

    @property
    def too_slow(self) -> str:
        return (
            f"the grammar takes over {self.build_s:g} s to build, which is the limit; make it "
            "smaller: fewer and shorter bounds of repetition, fewer alternatives, less nesting"
        )

    @property
    def too_large(self) -> str:
        return (
            f"the grammar takes over {self.memory_bytes >> 20} MiB to build, which is the limit, "
            "or is nested too deeply; make it smaller: fewer and shorter bounds of repetition, "
            "fewer alternatives"
        )

    @property
    def too_long(self) -> str:
        return (
            f"the grammar could not be checked within {self.wall_s:g} s, which is the limit; make "
            "it smaller: fewer and shorter bounds of repetition, fewer alternatives, less nesting"
        )


class GrammarJob(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of the two is to be checked."""

    wanted: StructuredOutputs | None = None
    grammar: str = ""

    @property
    def param(self) -> str:
        """The field that is spoken of."""
        return "grammar" if self.wanted is None else f"structured_outputs.{self.wanted.kind}"


class Verdict(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The grammar, or what is wrong with it."""

    grammar: str | None = None
    error: str = ""
    param: str | None = None


def frame_of(content: bytes) -> bytes:
    """The content with its length in front."""
    return _LENGTH.pack(len(content)) + content


def length_of(begun: bytes) -> int:
    """How long the frame is that begins so, as far as can be told: of nothing, its head's."""
    if len(begun) < _LENGTH.size:
        return _LENGTH.size
    return _LENGTH.size + int(_LENGTH.unpack_from(begun)[0])


def read_frame(source: BinaryIO) -> bytes | None:
    """The content of the next frame; None at the end."""
    head = source.read(_LENGTH.size)
    length = length_of(head) - _LENGTH.size
    content = source.read(length)
    return content if head and len(content) == length else None
