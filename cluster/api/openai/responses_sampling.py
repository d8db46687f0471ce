"""From the fields of a `/v1/responses` body to `SamplingParams`."""

from msgspec.structs import replace

from cluster.api.errors import bad_request
from cluster.api.openai.responses_body import JsonObjectFormat, JsonSchemaFormat, ResponsesBody
from cluster.api.openai.sampling import merged, naming
from cluster.messages.clients import GenerationDefaults
from scheduler.sampling import MAX_LOGPROBS, SamplingParams
from scheduler.structured import StructuredOutputs

LOGPROBS = "message.output_text.logprobs"

_FOR_OTHER_ROUTES = {
    "n": "make several calls",
    "response_format": "its name here is text.format",
    "max_tokens": "its name here is max_output_tokens",
    "prompt_logprobs": "use /v1/completions",
    "return_token_ids": "use /v1/completions",
}


def responses_sampling(
    body: ResponsesBody, defaults: SamplingParams, of_model: GenerationDefaults
) -> SamplingParams:
    """What a response asks for. If nobody sets a limit, its answer may fill the context.

    Raises:
        InvalidRequest, ApiError: 400
    """
    for name, instead in _FOR_OTHER_ROUTES.items():
        if getattr(body, name) not in (None, False, *([1] if name == "n" else [])):
            raise bad_request(f"{name} is not for /v1/responses: {instead}", name)
    _check_include(body)
    base = replace(defaults, n=1, max_tokens=of_model.max_tokens)
    logprobs = body.top_logprobs or 0 if body.wants_logprobs else None
    with naming("max_tokens", "max_output_tokens"):
        sampling = merged(body, base, {"max_tokens": body.max_output_tokens, "logprobs": logprobs})
    structure = _structure_of(body)
    return sampling if structure is None else replace(sampling, structured_outputs=structure)


def _check_include(body: ResponsesBody) -> None:
    for name in body.include or ():
        if name != LOGPROBS:
            raise bad_request(f"include may hold {LOGPROBS} alone, got {name!r:.80}", "include")
    top = body.top_logprobs
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise bad_request(
            f"top_logprobs must be an integer from 0 to {MAX_LOGPROBS}, got {top}", "top_logprobs"
        )
    if body.wants_logprobs and body.tools:
        raise bad_request(f"{LOGPROBS} cannot be had together with tools", "include")


def _structure_of(body: ResponsesBody) -> StructuredOutputs | None:
    with naming("structured_outputs.json", "text.format.schema"):
        match body.text and body.text.format:
            case JsonObjectFormat():
                return StructuredOutputs(json_object=True)
            case JsonSchemaFormat(schema_=schema):
                return StructuredOutputs(json=schema)
    return None
