"""How many tokens a call took."""

from msgspec import Struct

from cluster.api.calls import Call
from cluster.frontend.requests import LiveRequest


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int
    """Whose keys and values were in the prefix cache."""


class Usage(Struct, frozen=True, kw_only=True):
    """OpenAI's figures of one call, over all its prompts and outputs."""

    prompt_tokens: int
    """Each prompt counts once, however many outputs it has."""
    completion_tokens: int
    """All that were made, also those that add no text (an end token, a trimmed stop text) and
    those of outputs that `best_of` left out."""
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(call: Call, *, is_scoring: bool = False) -> Usage:
    """The figures by now.

    Args:
        is_scoring: the token that the engine had to make is not shown, and does not count.
    """
    num_prompt = sum(request.draft.num_prompt for request in call.requests)
    num_output = 0 if is_scoring else sum(len(output.token_ids) for output in call.outputs)
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_output,
        total_tokens=num_prompt + num_output,
        prompt_tokens_details=PromptTokensDetails(sum(map(_num_cached, call.requests))),
    )


def _num_cached(request: LiveRequest) -> int:
    """Later outputs of a prompt find what the first one computed, which was not cached before."""
    return min(output.num_cached_tokens for output in request.outputs)
