"""Where a JSON value ends, whose text comes in pieces."""

import re
from enum import Enum

DEEPEST = 64

_TEXT = re.compile(r'[^"\\]+')
_SCALAR = re.compile(r"[0-9A-Za-z+\-._]+")
_BETWEEN = re.compile(r"[0-9A-Za-z+\-._,:\s]+")
_CLOSER = {"{": "}", "[": "]"}


class Reading(Enum):
    UNFINISHED = "unfinished"
    COMPLETE = "complete"
    BROKEN = "broken"


class ValueScanner:
    """Follows quotes and brackets only, in time linear in the text.

    So a value that it calls complete may still be wrong JSON, such as `{"a": 1,,}`. What
    can be in no JSON value at all, such as a `<` outside quotes, breaks it.
    """

    def __init__(self) -> None:
        self.state = Reading.UNFINISHED
        self._closers: list[str] = []
        self._is_in_string = False
        self._is_escaped = False
        self._is_scalar = False

    def feed(self, text: str, at: int = 0) -> int:
        """Read on from `text[at]`; returns the place of the first character that is no part
        of the value, which is the end of `text` while the value is unfinished."""
        while at < len(text) and self.state is Reading.UNFINISHED:
            if self._is_in_string:
                at = self._in_string(text, at)
            elif self._is_scalar:
                at = self._in_scalar(text, at)
            else:
                at = self._in_brackets(text, at)
        return at

    def _in_string(self, text: str, at: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        if run := _TEXT.match(text, at):
            return run.end()
        if text[at] == "\\":
            self._is_escaped = True
        else:
            self._is_in_string = False
            self._end_if_outermost()
        return at + 1

    def _in_scalar(self, text: str, at: int) -> int:
        run = _SCALAR.match(text, at)
        end = run.end() if run else at
        if end < len(text):
            self.state = Reading.COMPLETE
        return end

    def _in_brackets(self, text: str, at: int) -> int:
        """At the first character of the value, or between the brackets of it."""
        mark = text[at]
        if mark == '"':
            self._is_in_string = True
        elif mark in _CLOSER and len(self._closers) < DEEPEST:
            self._closers.append(_CLOSER[mark])
        elif self._closers and mark == self._closers[-1]:
            self._closers.pop()
            self._end_if_outermost()
        elif self._closers and (run := _BETWEEN.match(text, at)):
            return run.end()
        elif not self._closers and _SCALAR.match(text, at):
            self._is_scalar = True
            return at
        else:
            self.state = Reading.BROKEN
            return at
        return at + 1

    def _end_if_outermost(self) -> None:
        if not self._closers:
            self.state = Reading.COMPLETE
