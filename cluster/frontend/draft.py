"""A caller's request, checked and completed, ready to be submitted to an engine.

The border: whatever a caller may get wrong is refused here with `InvalidRequest`, before
anything is sent. What only the engine knows (the size of its KV pools, its queue, its
policy) comes back as a `Rejection`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np

from cluster.frontend.text_stream import TextStream
from cluster.frontend.tokenizer import Tokenizer
from cluster.logs import EventLog
from cluster.messages.clients import GenerationDefaults, ServerInfo
from scheduler.arrays import Int32Array, int32
from scheduler.errors import InvalidRequest
from scheduler.request import Request
from scheduler.sampling import INT32_MAX, SamplingParams

Prompt: TypeAlias = str | Mapping[str, object] | Sequence[int]
"""A text, `{"prompt": text}`, `{"prompt_token_ids": ids}`, or the ids themselves."""

MAX_LABEL_CHARS = 256
MAX_SALT_CHARS = 1024

_log = EventLog("client")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What a caller may say about a request besides the prompt and the sampling."""

    priority: int = 0
    """Lower starts first; needs the `priority` policy."""
    cache_salt: str | None = None
    """Prefixes are reused only between requests of the same salt."""
    timeout_s: float | None = None
    """Seconds from arrival after which the request ends wherever it is."""
    request_id: str | None = None
    """The caller's own name for it; need not be unique. None: one is made up."""

    def __post_init__(self) -> None:
        if not _is_int(self.priority) or abs(self.priority) > INT32_MAX:
            raise _wrong("priority", f"an integer within ±{INT32_MAX}", self.priority)
        _check_text("cache_salt", self.cache_salt, MAX_SALT_CHARS)
        _check_text("request_id", self.request_id, MAX_LABEL_CHARS)
        timeout_s: object = self.timeout_s
        if timeout_s is None:
            return
        is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
        if not is_number or not math.isfinite(self.timeout_s or 0) or (self.timeout_s or 0) <= 0:
            raise _wrong("timeout_s", "a number of seconds above 0", timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A request that an engine with the same model can take as it is."""

    request_id: str
    prompt: str | None
    """None if token ids were given."""
    prompt_token_ids: list[int]
    sampling: SamplingParams
    """The caller's, with `seed`, `max_tokens`, `bad_word_ids` and `grammar` filled in."""
    options: RequestOptions
    end_ids: tuple[int, ...]
    tokenizer: Tokenizer | None
    hides_end: bool = False
    """Whether the text of the token that ends an output is never a part of it."""

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_token_ids)

    def text_stream(self) -> TextStream | None:
        return None if self.tokenizer is None else self.tokenizer.text_stream(self.sampling)

    def requests(self, handles: Sequence[int]) -> list[Request]:
        """One request for each of the `n` outputs; output i has the seed of output 0 plus i."""
        assert len(handles) == self.sampling.n
        prompt = int32(self.prompt_token_ids)
        return [self._request(prompt, handle, i) for i, handle in enumerate(handles)]

    def continuation(
        self,
        handle: int,
        index: int,
        output: Sequence[int],
        age_s: float,
        deaths: tuple[str, ...] = (),
    ) -> Request:
        """The request for output `index`, of which some tokens are here, for another engine."""
        request = self._request(int32(self.prompt_token_ids), handle, index)
        sampling = request.sampling
        if output:  # the prompt's log-probabilities came with the first token, or before
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return msgspec.structs.replace(
            request, sampling=sampling, output=int32(output), age_s=age_s, deaths=deaths
        )

    def last_adds_text(self, token_id: int) -> bool:
        """Whether the text of a token that ends the output belongs to it.

        An ordinary one, which ends it as one of `stop_token_ids`, is trimmed like a stop
        string; for special tokens `skip_special_tokens` decides.
        """
        if self.hides_end:
            return False
        if self.sampling.include_stop_str_in_output:
            return True
        return self.tokenizer is not None and token_id in self.tokenizer.special_ids

    def _request(self, prompt: Int32Array, handle: int, index: int) -> Request:
        assert self.sampling.seed is not None
        return Request(
            handle=handle,
            prompt=prompt,
            # Texts are the front end's business, so they need not travel.
            sampling=msgspec.structs.replace(
                self.sampling,
                n=1,
                seed=self.sampling.seed + index,
                stop=(),
                bad_words=(),
                structured_outputs=None,
            ),
            end_ids=self.end_ids,
            priority=self.options.priority,
            cache_salt=self.options.cache_salt,
            timeout_s=self.options.timeout_s,
            label=self.request_id if self.sampling.n == 1 else f"{self.request_id}-{index}",
        )


def draft_of(
    prompt: Prompt,
    sampling: SamplingParams,
    options: RequestOptions,
    *,
    info: ServerInfo,
    tokenizer: Tokenizer | None,
    seed: int,
    request_id: str,
    prompt_text: str | None = None,
) -> Draft:
    """Check a request against the model and fill in what it leaves open.

    Args:
        seed: used if the caller set none.
        request_id: used if the caller gave none.
        prompt_text: what to show as the prompt if it is given as ids, such as a rendered chat.
    Raises:
        InvalidRequest: it cannot be served; the message says what was wanted and the limit.
    """
    text, ids = _text_and_ids(prompt, tokenizer)
    _check_prompt(ids, info)
    return Draft(
        request_id=options.request_id or request_id,
        prompt=prompt_text if text is None else text,
        prompt_token_ids=ids,
        sampling=_completed(sampling, len(ids), info, tokenizer, seed),
        options=options,
        end_ids=info.end_ids,
        tokenizer=tokenizer,
    )


def default_sampling(defaults: GenerationDefaults) -> SamplingParams:
    """The sampling of a caller who says nothing: the model's own, then ours.

    Values that we would refuse from a caller are left out, with a warning.
    """
    given = {
        name: value for name, value in msgspec.structs.asdict(defaults).items() if value is not None
    }
    taken: dict[str, float] = {}
    for name, value in given.items():
        try:
            SamplingParams(**{name: value})
        except InvalidRequest as error:
            _log.warning("generation_default_left_out", name=name, value=value, reason=error)
        else:
            taken[name] = value
    if taken:
        _log.info("generation_defaults_hold", **taken)
    return msgspec.convert(taken, SamplingParams)


def _text_and_ids(prompt: object, tokenizer: Tokenizer | None) -> tuple[str | None, list[int]]:
    if isinstance(prompt, Mapping):
        known = {"prompt", "prompt_token_ids"} & prompt.keys()
        if len(known) != 1 or len(prompt) != 1:
            raise _wrong(
                "prompt", "{'prompt': text} or {'prompt_token_ids': ids}", sorted(map(str, prompt))
            )
        (prompt,) = prompt.values()
        if known == {"prompt_token_ids"} and isinstance(prompt, str):
            raise _wrong("prompt_token_ids", "a list of token ids", prompt)
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidRequest(
                "the engine's model has no tokenizer, so prompts must be token ids: "
                '{"prompt_token_ids": [...]}',
                param="prompt",
            )
        return prompt, tokenizer.encode(prompt)
    if isinstance(prompt, np.ndarray) and prompt.ndim == 1:
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise _wrong("prompt", "a text or a list of token ids", prompt)
    ids = list(prompt)
    if not set(map(type, ids)) <= {int}:
        ids = [int(item) if isinstance(item, np.integer) else item for item in ids]
    if not set(map(type, ids)) <= {int}:
        wrong = next(item for item in ids if not _is_int(item))
        raise _wrong("prompt_token_ids", "integers", wrong)
    return None, ids


def _check_prompt(ids: list[int], info: ServerInfo) -> None:
    if not ids:
        raise InvalidRequest(
            "the prompt is empty: it has 0 tokens, at least 1 is needed", param="prompt"
        )
    if len(ids) >= info.max_model_len:
        raise InvalidRequest(
            f"the prompt has {len(ids)} tokens and one more must be produced, but the context "
            f"holds {info.max_model_len}. Shorten the prompt, or start the engine with a larger "
            "max_model_len if the model allows it",
            param="prompt",
        )
    for wrong in (min(ids), max(ids)):
        if 0 <= wrong < info.vocab_size:
            continue
        raise InvalidRequest(
            f"the prompt holds token id {wrong}; the model's vocabulary has ids 0 to "
            f"{info.vocab_size - 1}",
            param="prompt",
        )


def _completed(
    sampling: SamplingParams,
    num_prompt: int,
    info: ServerInfo,
    tokenizer: Tokenizer | None,
    seed: int,
) -> SamplingParams:
    if not isinstance(sampling, SamplingParams):
        raise _wrong("sampling_params", "SamplingParams", sampling)
    if tokenizer is None:
        _check_needs_no_tokenizer(sampling)
    room = info.max_model_len - num_prompt
    if sampling.min_tokens > room:
        raise InvalidRequest(
            f"min_tokens={sampling.min_tokens}, but the prompt of {num_prompt} tokens leaves "
            f"room for {room} in the context of {info.max_model_len}",
            param="min_tokens",
        )
    banned = tuple(tuple(word) for word in sampling.bad_word_ids)
    if sampling.bad_words and tokenizer is not None:
        banned += tokenizer.bad_word_ids(sampling.bad_words)
    completed = msgspec.structs.replace(
        sampling,
        seed=seed if sampling.seed is None else sampling.seed,
        max_tokens=room if sampling.max_tokens is None else min(sampling.max_tokens, room),
        bad_word_ids=banned,
        grammar=None if tokenizer is None else tokenizer.grammar(sampling),
    )
    completed.check_vocabulary(info.vocab_size)
    if tokenizer is not None:
        tokenizer.text_stream(completed)  # refuses stop strings that are too long altogether
    return completed


def _check_needs_no_tokenizer(sampling: SamplingParams) -> None:
    for param in ("stop", "bad_words", "structured_outputs", "grammar"):
        if getattr(sampling, param):
            raise InvalidRequest(
                f"{param} needs a tokenizer, and the engine's model has none; use token ids",
                param=param,
            )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_text(name: str, value: object, most: int) -> None:
    if value is None:
        return
    if not isinstance(value, str) or not value:
        raise _wrong(name, "a non-empty text, or None", value)
    if len(value) > most:
        raise InvalidRequest(
            f"{name} has {len(value)} characters, at most {most} may be", param=name
        )


def _wrong(name: str, wanted: str, got: object) -> InvalidRequest:
    return InvalidRequest(f"{name} must be {wanted}, got {got!r:.200}", param=name)
