"""Bodies, routes and methods that the framework itself refuses, as our own errors."""

from collections.abc import Sequence

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
    """What is wrong with a body: where, what was wanted, what came.

    A field that may have several shapes is wrong in several ways; the one that got furthest
    into the body is told.
    """
    problems = error.errors()
    first = max(problems, key=lambda problem: len(_place(problem["loc"], error.body)))
    if first["type"] == "json_invalid":
        detail = first.get("ctx", {}).get("error", first["msg"])
        return bad_request(f"the body is not JSON: {detail} at character {first['loc'][-1]}")
    given = first.get("input")
    if tuple(first["loc"]) == ("body",) and first["type"] != "missing":
        if isinstance(given, bytes):
            return bad_request("the body must be JSON, sent with Content-Type: application/json")
        return bad_request(f"the body must be a JSON object, got {_shown(given)}")
    place = _place(first["loc"], error.body)
    if first["type"] == "missing":
        place = [*place, first["loc"][-1]]
    param = _path(place) or None
    name = "the body" if param is None else param
    if first["type"] == "missing":
        return bad_request(f"{name} is missing", param)
    return bad_request(f"{name}: {first['msg']}, got {_shown(given)}", param)


def _place(steps: Sequence[str | int], body: object) -> list[str | int]:
    """The steps that lead into the body; others name one of the shapes of a field."""
    place: list[str | int] = []
    for step in steps[1:]:
        if isinstance(body, dict):
            if step not in body:
                continue
            body = body[step]
        elif isinstance(body, list) and isinstance(step, int) and step < len(body):
            body = body[step]
        else:
            continue
        place.append(step)
    return place


def _path(place: Sequence[str | int]) -> str:
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)
    return "".join(steps).removeprefix(".")


def of_http_exception(error: HTTPException, where: str) -> ApiError:
    kind = _KIND_BY_STATUS.get(error.status_code)
    if kind is None:
        shape = FAILED if error.status_code >= 500 else BAD_REQUEST
        kind = ErrorKind(error.status_code, shape.type)
    messages = {
        404: f"there is no route {where}; {_route_instead(where)}",
        405: f"{where} is not possible; this route takes {_allowed(error)}",
        400: f"the body cannot be read: {error.detail}",
    }
    message = messages.get(error.status_code, str(error.detail))
    return ApiError(message, kind, headers=dict(error.headers or {}))


def _route_instead(where: str) -> str:
    """What most likely was meant: clients add their path to a base URL, which ends in /v1 here."""
    path = where.partition(" ")[2]
    if path.startswith("/v1/v1/"):
        return f"perhaps {path.removeprefix('/v1')}, if the base URL had /v1 once"
    if path in ("/chat/completions", "/completions", "/responses", "/models"):
        return f"perhaps /v1{path}, if the base URL ended in /v1"
    return "GET /openapi.json lists those that there are"


def _allowed(error: HTTPException) -> str:
    return (error.headers or {}).get("Allow", "another method")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
