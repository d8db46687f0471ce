"""Events as lines of key=value pairs, always with ids; who writes them and who shows them.

A process's main calls `show_events` once; everybody else gets an `EventLog` and names what
happened. Info: life events. Debug: steps. Nothing here assembles sentences.
"""

import json
import logging
import re
import sys
from typing import TextIO

LEVELS = ("debug", "info", "warning", "error")

_ROOT = "stoker"
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:/+*@%,[]()")

_EVENT_LINE = re.compile(r"\d\d:\d\d:\d\d\.\d{3} (?P<level>[A-Z]+) +(?P<said>.*)")
"""What `show_events` writes, as another process reads it."""


def show_events(process: str, level: str = "info", stream: TextIO | None = None) -> None:
    """Write this process's events of `level` and above to a stream, standard error by default.

    Args:
        process: what to call this process in each line, for example "engine".
        level: one of `LEVELS`.
    """
    root = logging.getLogger(_ROOT)
    for old in list(root.handlers):
        root.removeHandler(old)
    shown = logging.StreamHandler(stream if stream is not None else sys.stderr)
    shown.setFormatter(
        logging.Formatter(
            f"%(asctime)s.%(msecs)03d %(levelname)-7s {process} %(message)s", "%H:%M:%S"
        )
    )
    root.addHandler(shown)
    root.setLevel(level.upper())
    root.propagate = False


def is_routine(line: str) -> bool:
    """Whether another process's line is an event that explains no failure: below a warning."""
    event = _EVENT_LINE.fullmatch(line)
    return event is not None and event["level"] in ("DEBUG", "INFO")


class EventLog:
    """Names events of one part of the program; its own ids go into each line."""

    def __init__(self, part: str, **ids: object) -> None:
        self._part = part
        self._ids = ids
        self._logger = logging.getLogger(f"{_ROOT}.{part}")

    def with_ids(self, **ids: object) -> "EventLog":
        """The same log with more ids in each line."""
        return EventLog(self._part, **self._ids, **ids)

    def debug(self, event: str, **fields: object) -> None:
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._write(logging.ERROR, event, fields)

    def relay(self, who: str, line: str) -> None:
        """Show a line that another process wrote, with its name before it: an event of its log at
        the event's own level, anything else as it is."""
        level = logging.INFO
        event = _EVENT_LINE.fullmatch(line)
        if event is not None and event["level"].lower() in LEVELS:
            level = logging.getLevelNamesMapping()[event["level"]]
            line = event["said"].removeprefix(f"{who} ")
        self._logger.log(level, "[%s] %s", who, line)

    def _write(self, level: int, event: str, fields: dict[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", event_line(event, {**self._ids, **fields}))


def event_line(event: str, fields: dict[str, object]) -> str:
    """The event and its fields as one line; values that are not plain words are quoted."""
    return " ".join([event, *(f"{name}={_shown(value)}" for name, value in fields.items())])


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if text and _PLAIN.issuperset(text) else json.dumps(text, ensure_ascii=False)
