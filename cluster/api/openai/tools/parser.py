"""Finds the tool calls in an answer as it grows.

What comes out does not depend on how the text was cut: content joined, and each call's
arguments joined, are the same whether the text came whole or letter by letter. White space
next to a call belongs to nobody and is dropped. What only looks like a call comes out as
content, to the letter.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from cluster.api.openai.tools.call_reader import CallReader
from cluster.api.openai.tools.formats import ToolFormat
from cluster.api.openai.tools.json_value import Reading


@dataclass(frozen=True, slots=True)
class ContentText:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call; comes once for each, before its arguments."""

    index: int
    """Counts the calls of one answer."""
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsText:
    """The next piece of a call's arguments. All pieces together are JSON, if the model wrote
    JSON and was not cut."""

    index: int
    text: str


ToolEvent: TypeAlias = ContentText | CallBegins | ArgumentsText

_SPACE = " \t\r\n"
_PORTION = 256
"""Letters looked at together: what is clear is cut off what is held, which copies the rest."""


class _Mode(Enum):
    CONTENT = "content"
    OPENED = "opened"
    """Behind an opening mark."""
    READING = "reading"
    AFTER = "after"
    """Behind a call."""
    OVER = "over"
    """No more calls are wanted."""


class ToolParser:
    """The text of one answer in, content and calls out."""

    def __init__(
        self,
        tool_format: ToolFormat,
        names: Collection[str],
        *,
        new_id: Callable[[], str],
        most_calls: int | None = None,
    ) -> None:
        """
        Args:
            names: of the tools offered.
            new_id: makes the id of a call.
            most_calls: the answer ends for us behind that many.
        """
        self._format = tool_format
        self._names = frozenset(names)
        self._new_id = new_id
        self._most_calls = most_calls
        self.num_calls = 0
        self._mode = _Mode.CONTENT
        self._held = ""
        """Text that is not clear yet."""
        self._lead = ""
        """What the call being tried has used up; content after all, if it breaks."""
        self._is_behind_call = False
        self._reader = CallReader(self._is_name)
        self._events: list[ToolEvent] = []

    def feed(self, text: str) -> list[ToolEvent]:
        """What more text makes certain."""
        for start in range(0, len(text), _PORTION):
            self._held += text[start : start + _PORTION]
            while self._held and self._step():
                pass
        return self._taken()

    def flush(self) -> list[ToolEvent]:
        """What is left when the text ends: of a call cut before its name is known, content."""
        if self._mode in (_Mode.OPENED, _Mode.READING) and not self._reader.has_begun:
            self._put_content(self._lead + self._held)
        elif self._mode is _Mode.CONTENT:
            self._put_content(self._held.lstrip(_SPACE) if self._is_behind_call else self._held)
        self._held, self._mode = "", _Mode.OVER
        return self._taken()

    def _step(self) -> bool:
        """Take something from the held text; False if more text is needed first."""
        match self._mode:
            case _Mode.CONTENT:
                return self._search()
            case _Mode.OPENED:
                return self._enter()
            case _Mode.READING:
                return self._read()
            case _Mode.AFTER:
                return self._leave()
            case _Mode.OVER:
                self._held = ""
        return False

    def _search(self) -> bool:
        if self._is_behind_call:
            self._held = self._held.lstrip(_SPACE)
        found = self._format.first_opening(self._held)
        if found is None:
            clear = len(self._held) - _prefix_at_end(self._held, self._format.opening)
            clear = len(self._held[:clear].rstrip(_SPACE))
            self._put_content(self._held[:clear])
            self._held = self._held[clear:]
            return False
        clear = len(self._held[: found[0]].rstrip(_SPACE))
        self._put_content(self._held[:clear])
        self._lead, self._held = self._held[clear : found[1]], self._held[found[1] :]
        self._open()
        return True

    def _open(self) -> None:
        self._mode, self._reader = _Mode.OPENED, CallReader(self._is_name)

    def _enter(self) -> bool:
        self._skip(_SPACE + self._format.before_object)
        self._mode = _Mode.READING if self._held else _Mode.OPENED
        return bool(self._held)

    def _skip(self, letters: str) -> None:
        kept = self._held.lstrip(letters)
        self._lead += self._held[: len(self._held) - len(kept)]
        self._held = kept

    def _read(self) -> bool:
        reader = self._reader
        had_begun = reader.has_begun
        used = reader.feed(self._held)
        if reader.has_begun and not had_begun:
            self._begin(reader.name or "")
        if arguments := reader.take_arguments():
            self._events.append(ArgumentsText(self.num_calls - 1, arguments))
        if not reader.has_begun:
            self._lead += self._held[:used]
        self._held = self._held[used:]
        if reader.state is Reading.UNFINISHED:
            return False
        if reader.has_begun:
            is_last = self.num_calls == self._most_calls
            self._mode = _Mode.OVER if is_last else _Mode.AFTER
        else:
            self._mode = _Mode.CONTENT
            self._put_content(self._lead)
        return True

    def _begin(self, name: str) -> None:
        self._events.append(CallBegins(self.num_calls, self._new_id(), name))
        self.num_calls += 1
        self._lead, self._is_behind_call = "", True

    def _leave(self) -> bool:
        body = self._held.lstrip(_SPACE + self._format.between_calls)
        marks = [mark for mark in (self._format.opening, self._format.closing) if mark]
        if any(mark != body and mark.startswith(body) for mark in marks):
            return False  # also if nothing is left
        self._mode = _Mode.CONTENT
        if self._format.closing and body.startswith(self._format.closing):
            self._held = body[len(self._format.closing) :]
        elif body.startswith("{"):
            self._lead, self._held = self._held[: len(self._held) - len(body)], body
            self._open()
        elif body.startswith(self._format.opening):
            self._held = body
        return True

    def _is_name(self, name: str) -> bool:
        return not self._format.may_be_bare or name in self._names

    def _put_content(self, text: str) -> None:
        if text:
            self._events.append(ContentText(text))
            self._is_behind_call = False

    def _taken(self) -> list[ToolEvent]:
        taken = self._events
        self._events = []
        return taken


def _prefix_at_end(text: str, mark: str) -> int:
    """Length of the longest end of the text that could be the start of the mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
