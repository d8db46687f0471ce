"""The prompts of one call, and the drafts that they become on a thread of the pool."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cluster.api.errors import ApiError, bad_request
from cluster.frontend.draft import Draft, RequestOptions, draft_of
from cluster.frontend.tokenizer import Tokenizer
from cluster.messages.clients import ServerInfo
from scheduler.errors import InvalidRequest
from scheduler.sampling import SamplingParams

OnePrompt: TypeAlias = str | Sequence[int]


def listed_prompts(prompt: object, most: int) -> list[OnePrompt]:
    """A text, a list of ids, or a list of either, as a list of prompts.

    Raises:
        ApiError: 400, none or more than `most`, or something else.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise _wrong_prompt(type(prompt).__name__)
    if not prompt:
        raise bad_request("prompt is an empty list; give at least one prompt", "prompt")
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [prompt]
    if len(prompt) > most:
        raise bad_request(
            f"prompt has {len(prompt)} prompts, at most {most} may be in one call "
            "(max_prompts_per_request)",
            "prompt",
        )
    for each in prompt:
        is_ids = isinstance(each, list) and set(map(type, each)) <= {int}
        if not isinstance(each, str) and not is_ids:
            raise _wrong_prompt(f"a list with {each!r:.80}")
    return list(prompt)


def num_chars(prompts: Sequence[OnePrompt]) -> int:
    """Of the texts that must be encoded."""
    return sum(len(prompt) for prompt in prompts if isinstance(prompt, str))


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """What the drafts of one call have in common."""

    call_id: str
    info: ServerInfo
    sampling: SamplingParams
    options: RequestOptions
    draw_seed: Callable[[], int]
    num_kept: int | None = None
    """Tokens at the end of a longer prompt that are kept; -1: as many as the context holds."""

    def draft(self, ids: list[int], tokenizer: Tokenizer | None, text: str | None = None) -> Draft:
        """
        Args:
            text: of the ids, if they were made from one.
        Raises:
            InvalidRequest: it cannot be served.
        """
        kept = self._kept(ids)
        return draft_of(
            kept,
            self.sampling,
            self.options,
            info=self.info,
            tokenizer=tokenizer,
            seed=self.draw_seed(),
            request_id=self.call_id,
            prompt_text=text if len(kept) == len(ids) else None,
        )

    def _kept(self, ids: list[int]) -> list[int]:
        if self.num_kept is None:
            return ids
        most = self.num_kept
        if most == -1:
            wanted = max(1, self.sampling.min_tokens, self.sampling.max_tokens or 1)
            most = max(1, self.info.max_model_len - wanted)
        return ids[-most:]


def checked_num_kept(value: int | None) -> int | None:
    """`truncate_prompt_tokens` of a body.

    Raises:
        ApiError: 400
    """
    if value is not None and value != -1 and value < 1:
        raise bad_request(
            f"truncate_prompt_tokens must be -1 or at least 1, got {value}",
            "truncate_prompt_tokens",
        )
    return value


def encoded(
    prompt: OnePrompt, tokenizer: Tokenizer | None, *, add_special_tokens: bool
) -> tuple[list[int], str | None]:
    """Ids and text of a prompt of `/v1/completions`; no text where ids were given."""
    if not isinstance(prompt, str):
        return list(prompt), None
    if tokenizer is None:
        raise InvalidRequest(
            "the engine's model has no tokenizer, so prompts must be lists of token ids",
            param="prompt",
        )
    return tokenizer.encode(prompt, add_special_tokens=add_special_tokens), prompt


def _wrong_prompt(got: str) -> ApiError:
    return bad_request(
        f"prompt must be a text, a list of token ids, or a list of texts or such lists, got {got}",
        "prompt",
    )
