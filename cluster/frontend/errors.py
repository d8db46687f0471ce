"""What a client of an engine can be told instead of an answer.

Wrong requests are `scheduler.errors.InvalidRequest`; the rest is here. Each message says
what was wanted, what happened, and what to do.
"""

from scheduler.errors import InvalidRequest
from scheduler.request import Rejection


class RequestError(Exception):
    """A request got no answer, through no fault of its own."""


class RequestRefused(RequestError):
    """The engine did not take the request; nothing of it was computed."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(RequestRefused):
    """Too many requests or prompt tokens wait already; try again after `retry_after_s`."""


class RequestTimedOut(RequestRefused):
    """The request's own `timeout_s` cannot be met, or passed before it produced anything."""


class ShuttingDown(RequestRefused):
    """The engine finishes what it has and takes nothing new."""


class NoWorkers(RequestRefused):
    """No worker group is ready to compute anything."""


class EngineLost(RequestError, ConnectionError):
    """The connection to the engine broke while the request was live, or before it was sent."""


class EngineUnreachable(RequestError, TimeoutError):
    """Nothing that answers as an engine was found at the address in the time allowed."""


def unreachable(
    address: str, limit_s: float, *, news: str = "", last_loss: str = "", key_file: str = ""
) -> EngineUnreachable:
    """What to tell a caller who waited for a ready engine.

    Args:
        news: what the engine said about itself, if one was there.
        last_loss: why the connection before this one ended, if there was one.
        key_file: with which it was dialled, if with one.
    """
    if news:
        return EngineUnreachable(
            f"the engine at {address} is not ready: {news} (waited {limit_s:g} s)"
        )
    loss = f" The last connection ended: {last_loss}." if last_loss else ""
    keys = ""
    if address.startswith("tcp"):
        keys = " If it encrypts, its key_file (STOKER_KEY_FILE) is needed."
        if key_file:
            keys = f" The key file is {key_file}: is it the one that this engine's start wrote?"
    return EngineUnreachable(
        f"no engine answers at {address} (waited {limit_s:g} s).{loss} Is one running there "
        f"(`stoker serve`)?{keys}"
    )


class ProtocolMismatch(RequestError):
    """The other side speaks another version of the protocol."""


class ClientClosed(RequestError):
    """The client was closed, before or while the request ran."""


class WaitTimedOut(TimeoutError):
    """The caller's own wait ended; the request goes on."""


_BY_REASON: dict[str, type[RequestRefused]] = {
    "queue_full": QueueFull,
    "timeout": RequestTimedOut,
    "shutting_down": ShuttingDown,
    "no_workers": NoWorkers,
}


def error_of(rejection: Rejection) -> Exception:
    """The error that a rejection means to the caller."""
    if rejection.reason in ("invalid", "too_long"):
        return InvalidRequest(rejection.message, param=rejection.param)
    kind = _BY_REASON.get(rejection.reason, RequestRefused)
    return kind(rejection.message, retry_after_s=rejection.retry_after_s)
