"""What each side's process does: answer the runs that are asked for, one line of JSON each.

Standard library only: every peer's own interpreter imports this, from the repository's root.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

HEAD_LEN = 8
"""Output tokens of each request that are reported, so that sides can be compared."""
FIRST_ID, LAST_ID = 1000, 31000
"""The traces' token ids lie in [FIRST_ID, LAST_ID): known to both vocabularies, none special."""
TURN_SHIFT = 7919


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: exactly `max_tokens` tokens are to be made after the prompt, greedily."""

    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A whole trace, answered."""

    seconds: float
    output_tokens: int
    ttft_s: float | None = None
    """Median over the requests, where the side can tell."""
    decode_rate: float | None = None
    """Tokens per second after the first, of a trace of one request."""
    heads: list[list[int]] = field(default_factory=list)
    """The first tokens of each answer."""


def read_requests(path: str, turn: int, most_tokens: int | None = None) -> list[Asked]:
    """The requests of a trace, with other tokens in each turn, so that no cache knows them.

    Args:
        most_tokens: cut answers to this length, to warm up.
    """
    entries = json.loads(Path(path).read_text())
    return [
        Asked(
            [turned(token, turn) for token in entry["prompt_token_ids"]],
            min(entry["max_tokens"], most_tokens or entry["max_tokens"]),
        )
        for entry in entries
    ]


def turned(token: int, turn: int) -> int:
    """The token that stands in a trace's place in this turn; equal prefixes stay equal."""
    if not FIRST_ID <= token < LAST_ID:
        return token
    return FIRST_ID + (token - FIRST_ID + TURN_SHIFT * turn) % (LAST_ID - FIRST_ID)


def own_stdout() -> TextIO:
    """Standard output for us alone: what the peer prints goes to standard error."""
    ours = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return ours


def answer_runs(out: TextIO, run: Callable[[list[Asked]], Ran], about: str) -> None:
    """Say that the first token is there, then run whatever trace each input line names."""
    print(json.dumps({"about": about}), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            ran = run(read_requests(asked["path"], asked["turn"], asked["most_tokens"]))
            answer: dict[str, object] = asdict(ran)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)
