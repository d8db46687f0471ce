"""Why a worker group was lost, and whether a request can have been the cause."""

import signal
from typing import Literal, TypeAlias, get_args

EXIT_DONE, EXIT_FAILED, EXIT_NO_ENGINE, EXIT_FENCED, EXIT_PEER_LOST = 0, 1, 3, 4, 5
"""Codes with which a rank's process ends: told to; by an error that it has reported; without an
engine; stuck while it was told to; by the loss of another rank."""

LossReason: TypeAlias = Literal["died", "raised", "hung", "wrong", "cut", "node", "ended", "start"]
"""A process of it died; a rank raised an error; a step was not answered in time; a rank answered
what it was not asked; a rank's connection ended and nobody says why; its node was lost; somebody
ended a process of it; it was not ready yet, whatever happened."""

REASONS: tuple[LossReason, ...] = get_args(LossReason)

BY_REQUESTS: frozenset[LossReason] = frozenset(("died", "raised", "hung", "wrong"))
"""Reasons that count against the requests that were being computed. No request cuts a connection,
takes a node away or has a process ended in order."""

_ORDERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals by which people and systems end a process. Not SIGKILL, which is what the kernel sends
when memory is short."""


def reason_of_exit(code: int) -> LossReason:
    """What the exit code of a rank's process says; below 0: minus the signal that ended it."""
    if code == EXIT_DONE or any(code in (-number, 128 + number) for number in _ORDERS):
        return "ended"
    if code in (EXIT_NO_ENGINE, EXIT_FENCED, EXIT_PEER_LOST):
        return "cut"
    return "died"
