"""One call as a model writes it: an object with a name and arguments, in pieces."""

import json
from collections.abc import Callable

from cluster.api.openai.tools.json_value import Reading, ValueScanner

ARGUMENTS = ("arguments", "parameters")
"""The keys under which models give a function's arguments."""

_KEYS = frozenset({"name", "type", "id", *ARGUMENTS})
_FIRST_MARKS = {"name": '"', "arguments": '{"n'}


class CallReader:
    """Reads `{"name": "f", "arguments": {...}}`, keys in any order.

    The call has begun once its name is known and its arguments have started; from then on
    it is a call, however it goes on. Before, whatever no call can hold breaks it: another
    key, a name that `is_name` refuses. Arguments are given on as they are written. Some
    models write them as a text that holds JSON, or leave them out: the first is unpacked, the
    second becomes `{}`.
    """

    def __init__(self, is_name: Callable[[str], bool]) -> None:
        self.state = Reading.UNFINISHED
        self.name: str | None = None
        self._is_name = is_name
        self._wanted = "{"
        """The punctuation that may come next; "k" for a key, "v" for a value."""
        self._role = ""
        """What the value being read is: a key, the name, arguments (a text or null), the
        object of the arguments, or other."""
        self._value: ValueScanner | None = None
        self._text: list[str] = []
        self._seen: set[str] = set()
        self._arguments: list[str] = []
        self._has_arguments = False

    @property
    def has_begun(self) -> bool:
        return self.name is not None and self._has_arguments

    def feed(self, text: str) -> int:
        """Read on; returns how much of the text belongs to the call, which is all of it
        while the call is unfinished."""
        at = 0
        while at < len(text) and self.state is Reading.UNFINISHED:
            at = self._between(text, at) if self._value is None else self._inside(text, at)
        return at

    def take_arguments(self) -> str:
        """The arguments read since this was last asked; nothing before the call has begun."""
        if not self.has_begun:
            return ""
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def _between(self, text: str, at: int) -> int:
        mark = text[at]
        if mark.isspace():
            return at + 1
        match self._wanted, mark:
            case ("{", "{"):
                self._wanted = "k}"
            case ("k" | "k}", '"'):
                self._start("key")
                return at
            case ("k}" | ",", "}"):
                self._end()
                return at + (self.state is Reading.COMPLETE)
            case (":", ":"):
                self._wanted = "v"
            case (",", ","):
                self._wanted = "k"
            case ("v", _) if mark in _FIRST_MARKS.get(self._role, mark):
                is_object = self._role == "arguments" and mark == "{"
                self._start("object" if is_object else self._role)
                return at
            case _:
                self.state = Reading.BROKEN
                return at
        return at + 1

    def _start(self, role: str) -> None:
        self._role, self._value = role, ValueScanner()
        self._text.clear()

    def _inside(self, text: str, at: int) -> int:
        assert self._value is not None
        end = self._value.feed(text, at)
        piece = text[at:end]
        if self._role == "object":
            self._has_arguments = True
            self._arguments.append(piece)
        elif self._role != "other":
            self._text.append(piece)
        if self._value.state is not Reading.UNFINISHED:
            self.state, self._value = self._value.state, None
            if self.state is Reading.COMPLETE:
                self.state = Reading.UNFINISHED
                self._end_value()
        return end

    def _end_value(self) -> None:
        self._wanted = ","
        if self._role in ("object", "other"):
            return
        try:
            value = json.loads("".join(self._text), strict=False)
            str(value).encode()
        except ValueError:  # also half of a surrogate pair, which no answer could hold
            self.state = Reading.BROKEN
            return
        if self._role == "key":
            self._end_key(value)
        elif self._role == "name":
            self.name = value
            if not value or not self._is_name(value):
                self.state, self.name = Reading.BROKEN, None
        else:
            self._put_whole_arguments(value)

    def _end_key(self, key: str) -> None:
        role = "arguments" if key in ARGUMENTS else key if key == "name" else "other"
        if key not in _KEYS or role in self._seen:
            self.state = Reading.BROKEN
            return
        self._role, self._wanted = role, ":"
        if role != "other":
            self._seen.add(role)

    def _put_whole_arguments(self, value: object) -> None:
        """Arguments that came as a text, or as null."""
        arguments = value if isinstance(value, str) else "{}"
        if not arguments.lstrip().startswith("{"):
            self.state = Reading.BROKEN
            return
        self._has_arguments = True
        self._arguments.append(arguments)

    def _end(self) -> None:
        if self.name is None:
            self.state = Reading.BROKEN
            return
        if not self._has_arguments:
            self._put_whole_arguments(None)
        self.state = Reading.COMPLETE
