"""`/openapi.json`: FastAPI knows the bodies, we add what comes back.

Answers are msgspec structs, which FastAPI does not look into; a route names its own with
`answers`, and `described` puts their fields where OpenAPI wants them.
"""

import msgspec
from fastapi import FastAPI
from msgspec import Struct

from cluster.api.errors import ErrorAnswer

REF = "#/components/schemas/{name}"
_FIELDS = "x-fields"
"""Where a route keeps the schemas of its answer until they are moved."""

Responses = dict[int | str, dict[str, object]]


def answers(*kinds: type[Struct], chunk: type[Struct] | None = None) -> Responses:
    """What a route says of its answer.

    Args:
        kinds: of a whole answer, one of them.
        chunk: of each event, if it may also stream.
    """
    schemas, fields = msgspec.json.schema_components(
        [*kinds, *([chunk] if chunk else [])], ref_template=REF
    )
    whole = list(schemas[: len(kinds)])
    content: dict[str, object] = {
        "application/json": {"schema": whole[0] if len(whole) == 1 else {"anyOf": whole}}
    }
    if chunk is not None:
        content["text/event-stream"] = {"schema": schemas[-1]}
    return {200: {"content": content, _FIELDS: fields}}


def described(app: FastAPI) -> dict[str, object]:
    """The description of all routes."""
    description = app.openapi()
    components = description.setdefault("components", {}).setdefault("schemas", {})
    (error,), fields = msgspec.json.schema_components([ErrorAnswer], ref_template=REF)
    components |= fields
    for path in description["paths"].values():
        for operation in path.values():
            responses = operation["responses"]
            responses.pop("422", None)  # FastAPI's own shape, which nobody gets
            responses["default"] = {
                "description": "What went wrong",
                "content": {"application/json": {"schema": error}},
            }
            for response in responses.values():
                components |= response.pop(_FIELDS, {})
    for unused in ("HTTPValidationError", "ValidationError"):
        components.pop(unused, None)
    whole: dict[str, object] = description
    return whole
