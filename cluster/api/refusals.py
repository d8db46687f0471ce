"""Bodies, routes and methods that the framework itself refuses, as our own errors."""

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from cluster.api.errors import (
    BAD_REQUEST,
    FAILED,
    TOO_LARGE,
    UNKNOWN_ROUTE,
    WRONG_METHOD,
    ApiError,
    ErrorKind,
    bad_request,
)

MAX_SHOWN = 80
"""Characters of a wrong value that a message repeats."""

_KIND_BY_STATUS = {400: BAD_REQUEST, 404: UNKNOWN_ROUTE, 405: WRONG_METHOD, 413: TOO_LARGE}


def of_validation_error(error: RequestValidationError) -> ApiError:
    """The first thing wrong with a body: where, what was wanted, what came."""
    first = error.errors()[0]
    place, reason = first["loc"], first["msg"]
    if first["type"] == "json_invalid":
        detail = first.get("ctx", {}).get("error", reason)
        return bad_request(f"the body is not JSON: {detail} at character {place[-1]}")
    if tuple(place) == ("body",) and first["type"] != "missing":
        if isinstance(first.get("input"), bytes):
            return bad_request("the body must be JSON, sent with Content-Type: application/json")
        return bad_request(f"the body must be a JSON object, got {_shown(first.get('input'))}")
    param = ".".join(str(step) for step in place[1:] if step != "body") or None
    name = "the body" if param is None else param
    if first["type"] == "missing":
        return bad_request(f"{name} is missing", param)
    return bad_request(f"{name}: {reason}, got {_shown(first.get('input'))}", param)


def of_http_exception(error: HTTPException, where: str) -> ApiError:
    kind = _KIND_BY_STATUS.get(error.status_code)
    if kind is None:
        shape = FAILED if error.status_code >= 500 else BAD_REQUEST
        kind = ErrorKind(error.status_code, shape.type)
    messages = {
        404: f"there is no route {where}; GET /openapi.json lists those that there are",
        405: f"{where} is not possible; this route takes {_allowed(error)}",
        400: f"the body cannot be read: {error.detail}",
    }
    message = messages.get(error.status_code, str(error.detail))
    return ApiError(message, kind, headers=dict(error.headers or {}))


def _allowed(error: HTTPException) -> str:
    return (error.headers or {}).get("Allow", "another method")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
