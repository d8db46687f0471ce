"""From the fields of a body to `StructuredOutputs`."""

from collections.abc import Iterator
from contextlib import contextmanager

from cluster.api.errors import bad_request
from cluster.api.openai.generation_body import GenerationBody
from cluster.api.openai.structure_body import (
    ResponseFormatJsonObject,
    ResponseFormatJsonSchema,
    StructuredOutputsBody,
)
from scheduler.errors import InvalidRequest
from scheduler.structured import StructuredOutputs

_OLDER = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's earlier names, and the later ones."""

OURS = "structured_outputs"
TEXT_FORMAT = "text.format"
"""Where `/v1/responses` says it."""


def structure_of(body: GenerationBody) -> StructuredOutputs | None:
    """The form that a body wants its output to have, if any.

    Raises:
        InvalidRequest, ApiError: 400, for more than one, or a wrong one.
    """
    names = _given(body)
    if len(names) > 1:
        raise bad_request(
            f"{names[0]} and {names[1]} both say what form the output must have; give one",
            names[1],
        )
    if body.guided_whitespace_pattern is not None and names != ["guided_json"]:
        raise bad_request(
            "guided_whitespace_pattern goes with guided_json", "guided_whitespace_pattern"
        )
    if not names:
        return None
    with naming_structure(body):
        return _structure(body, names[0])


def may_need_grammar(body: GenerationBody) -> bool:
    """Whether a grammar may have to be made for a body, which can take seconds."""
    others = (getattr(body, name, None) for name in ("tools", "text"))
    return bool(_given(body)) or any(others)


@contextmanager
def naming_structure(body: GenerationBody) -> Iterator[None]:
    """Let errors name the field in which this body says its form."""
    try:
        yield
    except InvalidRequest as error:
        (name, *_) = (*_given(body), TEXT_FORMAT)
        if name == OURS or not (error.param or "").startswith(OURS):
            raise
        message = str(error).replace(error.param or "", name, 1)
        raise InvalidRequest(message, param=name) from error


def _given(body: GenerationBody) -> list[str]:
    names = [name for name in (OURS, *_OLDER) if getattr(body, name) is not None]
    if isinstance(body.response_format, ResponseFormatJsonObject | ResponseFormatJsonSchema):
        names.insert(0, "response_format")
    return names


def _structure(body: GenerationBody, name: str) -> StructuredOutputs:
    wanted = body.response_format if name == "response_format" else body.structured_outputs
    match wanted:
        case ResponseFormatJsonObject():
            return StructuredOutputs(json_object=True)
        case ResponseFormatJsonSchema(json_schema=named):
            return StructuredOutputs(json=named.schema_)
        case StructuredOutputsBody():
            known = StructuredOutputsBody.model_fields.items()
            return _made({field.alias or name: getattr(wanted, name) for name, field in known})
    return _made(
        {
            _OLDER[name]: getattr(body, name),
            "whitespace_pattern": body.guided_whitespace_pattern,
        }
    )


def _made(fields: dict[str, object]) -> StructuredOutputs:
    return StructuredOutputs(**fields)  # type: ignore[arg-type]  # checked there
