"""What goes wrong, as OpenAI's clients expect to read it.

The only place that turns errors into statuses and bodies. The official SDK picks its
exception class by the status, and tries 408, 429 and 5xx again by itself.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from cluster.frontend.errors import (
    ClientClosed,
    EngineLost,
    EngineUnreachable,
    NoWorkers,
    ProtocolMismatch,
    QueueFull,
    RequestRefused,
    RequestTimedOut,
    ShuttingDown,
)
from scheduler.errors import InvalidRequest

INVALID = "invalid_request_error"
SERVER = "server_error"


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """How one kind of failure looks from outside."""

    status: int
    type: str
    code: str | None = None
    retry_after_s: float | None = None
    """What `Retry-After` says where the failure itself does not know."""


class ErrorFields(Struct, frozen=True, kw_only=True):
    """What a client reads of an error."""

    message: str
    type: str
    param: str | None
    """The field or header that is wrong."""
    code: str | None


class ErrorAnswer(Struct, frozen=True, kw_only=True):
    """The body of every answer that is not a success."""

    error: ErrorFields


class ApiError(Exception):
    """A failure with the status and the body that the client gets."""

    def __init__(
        self,
        message: str,
        kind: ErrorKind,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.param = param
        self.retry_after_s = kind.retry_after_s if retry_after_s is None else retry_after_s
        self.more_headers = dict(headers or {})

    @property
    def status(self) -> int:
        return self.kind.status

    @property
    def headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return self.more_headers
        return self.more_headers | {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}

    def body(self) -> bytes:
        """OpenAI's error object. ASCII only: a message may repeat half of a surrogate pair."""
        error = ErrorFields(
            message=str(self), type=self.kind.type, param=self.param, code=self.kind.code
        )
        answer = msgspec.structs.asdict(ErrorAnswer(error=error))
        return json.dumps(answer, default=msgspec.structs.asdict, separators=(",", ":")).encode()


BAD_REQUEST = ErrorKind(400, INVALID)
UNAUTHORIZED = ErrorKind(401, INVALID, "invalid_api_key")
UNKNOWN_MODEL = ErrorKind(404, INVALID, "model_not_found")
UNKNOWN_ROUTE = ErrorKind(404, INVALID, "unknown_route")
UNKNOWN_REQUEST = ErrorKind(404, INVALID, "request_not_found")
WRONG_METHOD = ErrorKind(405, INVALID, "method_not_allowed")
CANNOT_SCALE = ErrorKind(409, INVALID, "cannot_scale")
CANNOT_DRAIN = ErrorKind(409, INVALID, "cannot_drain")
CANNOT_RELOAD = ErrorKind(409, INVALID, "cannot_reload")
CANNOT_UPGRADE = ErrorKind(409, INVALID, "cannot_upgrade")
TIMED_OUT = ErrorKind(408, "timeout", "request_timeout")
DIVERGED = ErrorKind(410, INVALID, "stream_diverged")
TOO_LARGE = ErrorKind(413, INVALID, "body_too_large")
KEY_REUSED = ErrorKind(422, INVALID, "idempotency_key_reused")
HEADERS_TOO_LARGE = ErrorKind(431, INVALID, "headers_too_large")
QUEUE_FULL = ErrorKind(429, "rate_limit_error", "queue_full", retry_after_s=1.0)
CANCELLED = ErrorKind(499, "cancelled", "request_cancelled")
FAILED = ErrorKind(500, SERVER, "internal_error")
SHUTTING_DOWN = ErrorKind(503, SERVER, "shutting_down", retry_after_s=5.0)
NOT_READY = ErrorKind(503, SERVER, "engine_not_ready", retry_after_s=1.0)
ENGINE_LOST = ErrorKind(503, SERVER, "engine_lost", retry_after_s=1.0)

_KINDS: Sequence[tuple[type[Exception], ErrorKind]] = (
    (InvalidRequest, BAD_REQUEST),
    (QueueFull, QUEUE_FULL),
    (RequestTimedOut, TIMED_OUT),
    (ShuttingDown, SHUTTING_DOWN),
    (NoWorkers, NOT_READY),
    (EngineUnreachable, NOT_READY),
    (ProtocolMismatch, NOT_READY),
    (ClientClosed, SHUTTING_DOWN),
    (EngineLost, ENGINE_LOST),
    (RequestRefused, NOT_READY),
)


def api_error_of(error: Exception) -> ApiError:
    """What a client is told of any exception; the text of one that nobody foresaw stays here."""
    if isinstance(error, ApiError):
        return error
    for kind_of_error, kind in _KINDS:
        if isinstance(error, kind_of_error):
            return ApiError(
                str(error),
                kind,
                param=getattr(error, "param", None),
                retry_after_s=getattr(error, "retry_after_s", None),
            )
    return ApiError("the server failed on this request; its log says why", FAILED)


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(message, BAD_REQUEST, param=param)
