"""Prompts from a file or standard input."""

import json
import sys
from pathlib import Path
from typing import TypeAlias

from scheduler.errors import InvalidRequest

Chat: TypeAlias = list[dict[str, object]]


def read_prompts(path: str) -> "list[str | Chat]":
    """One prompt for each line that is not empty; conversations only from .jsonl files.

    Args:
        path: of the file; - is standard input.
    Raises:
        OSError: it cannot be read.
        InvalidRequest: a line of a .jsonl file is none of the forms that are read.
    """
    if path == "-":
        lines = sys.stdin.read().splitlines()
    else:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    numbered = [(i, line) for i, line in enumerate(lines, start=1) if line.strip()]
    if not path.endswith(".jsonl"):
        return [line.strip() for _, line in numbered]
    return [_entry(line, f"{path}:{i}") for i, line in numbered]


def _entry(line: str, where: str) -> "str | Chat":
    try:
        value: object = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"{where} is not JSON: {error}", param="prompts_file") from error
    if isinstance(value, dict) and len(value) == 1:
        value = value.get("prompt", value.get("messages"))
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(message, dict) for message in value):
        return value
    raise InvalidRequest(
        f'{where} must be a text, a list of messages, {{"prompt": text}} or {{"messages": [...]}}',
        param="prompts_file",
    )
