"""From the fields of a body to `SamplingParams`: the request, then the model's file, then ours."""

from collections.abc import Iterator
from contextlib import contextmanager

from msgspec.structs import replace

from cluster.api.errors import bad_request
from cluster.api.openai.chat_body import ChatBody
from cluster.api.openai.completion_body import CompletionBody
from cluster.api.openai.generation_body import GenerationBody
from cluster.api.openai.structure import structure_of
from cluster.messages.clients import GenerationDefaults
from scheduler.errors import InvalidRequest
from scheduler.sampling import MAX_LOGPROBS, SamplingParams

_SHARED = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in GenerationBody.model_fields and name != "structured_outputs"
)


def completion_sampling(body: CompletionBody, defaults: SamplingParams) -> SamplingParams:
    """What a completion asks for.

    Raises:
        InvalidRequest, ApiError: 400
    """
    if is_scoring(body) and body.n not in (None, 1):
        raise bad_request(f"max_tokens=0 scores a prompt, which needs n=1, got n={body.n}", "n")
    wanted: dict[str, object] = {"logprobs": body.logprobs}
    if is_scoring(body):
        wanted |= {"max_tokens": 1, "min_tokens": 0, "temperature": 0.0}
    sampling = merged(body, defaults, wanted)
    if body.echo and sampling.logprobs is not None:
        most = max(sampling.logprobs, sampling.prompt_logprobs or 0)
        sampling = replace(sampling, prompt_logprobs=most)
    if body.best_of is None:
        return sampling
    num_outputs = sampling.n
    with naming("n", "best_of"):
        sampling = replace(sampling, n=body.best_of)
    if sampling.n < num_outputs:
        raise bad_request(f"best_of={sampling.n} is below n={num_outputs}", "best_of")
    if sampling.n > num_outputs and body.wants_stream:
        raise bad_request(
            f"best_of={sampling.n} above n={num_outputs} cannot be streamed, since the best are "
            "known only at the end",
            "best_of",
        )
    is_choice = sampling.n > num_outputs and sampling.logprobs is None
    return replace(sampling, logprobs=0) if is_choice else sampling


def chat_sampling(
    body: ChatBody, defaults: SamplingParams, of_model: GenerationDefaults
) -> SamplingParams:
    """What a chat asks for. If nobody sets a limit, its answer may fill the context.

    Raises:
        InvalidRequest, ApiError: 400
    """
    newer, older = body.max_completion_tokens, body.max_tokens
    if newer is not None and older is not None and newer != older:
        raise bad_request(
            f"max_completion_tokens={newer!r:.40} and max_tokens={older!r:.40} are two names of "
            "one limit; give one of them",
            "max_tokens",
        )
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise bad_request("top_logprobs needs logprobs=true", "top_logprobs")
        if not 0 <= body.top_logprobs <= MAX_LOGPROBS:
            raise bad_request(
                f"top_logprobs must be an integer from 0 to {MAX_LOGPROBS}, "
                f"got {body.top_logprobs}",
                "top_logprobs",
            )
    limit = newer if older is None else older
    base = replace(defaults, max_tokens=of_model.max_tokens)
    logprobs = body.top_logprobs or 0 if body.logprobs else None
    with naming("max_tokens", "max_completion_tokens" if older is None else "max_tokens"):
        return merged(body, base, {"logprobs": logprobs, "max_tokens": limit})


def is_scoring(body: CompletionBody) -> bool:
    """Whether only the prompt's own log-probabilities are wanted."""
    return body.max_tokens == 0 and type(body.max_tokens) is int and bool(body.echo)


def check_shared(body: GenerationBody, sampling: SamplingParams) -> None:
    """What the two routes check alike, beyond `SamplingParams`.

    Raises:
        ApiError: 400
    """
    if body.stream_options is not None and not body.wants_stream:
        raise bad_request("stream_options needs stream=true", "stream_options")
    if body.wants_stream and body.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs cannot be streamed; use stream=false", "prompt_logprobs")


def merged(
    body: GenerationBody, defaults: SamplingParams, wanted: dict[str, object]
) -> SamplingParams:
    given: dict[str, object] = {name: getattr(body, name) for name in _SHARED}
    given |= {"structured_outputs": structure_of(body)} | wanted
    return replace(defaults, **{name: v for name, v in given.items() if v is not None})


@contextmanager
def naming(ours: str, theirs: str) -> Iterator[None]:
    """Errors about our field name the caller's."""
    try:
        yield
    except InvalidRequest as error:
        if error.param != ours:
            raise
        message = str(error).replace(ours, theirs, 1)
        raise InvalidRequest(message, param=theirs) from error
