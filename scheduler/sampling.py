"""What a caller may ask of sampling and stopping, checked once at the border.

Names and defaults follow vLLM's where the meaning is the same. A `SamplingParams` that
exists is valid in itself; `check_vocabulary` checks what depends on the model.
"""

import math
import re
from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import force_setattr

from scheduler.errors import InvalidRequest, wrong_value
from scheduler.structured import StructuredOutputs

GREEDY_BELOW = 1e-2
"""Temperatures below this are greedy: logits divided by them only overflow or repeat argmax."""

MAX_N = 256
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_SEED = 2**63 - 1
INT32_MAX = 2**31 - 1
LEAST_REPETITION_PENALTY = 0.01
"""Logits divided by less could leave float32."""
MAX_GRAMMAR_CHARS = 2**20


class SamplingParams(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens and when to stop. Lists given to the constructor become tuples.

    Raises:
        InvalidRequest: a field of the wrong type or out of its range; `param` names it.
    """

    n: int = 1
    """Independent outputs per prompt, 1 to 256; output i of a seeded request uses seed + i."""
    temperature: float = 1.0
    """0 to 2. Below 0.01 is greedy."""
    top_p: float = 1.0
    """Keep the most probable tokens that together reach this share, (0, 1]."""
    top_k: int = 0
    """Keep this many most probable tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less probable than this share of the most probable one, [0, 1]."""
    repetition_penalty: float = 1.0
    """0.01 to 100. Divides (or multiplies, if negative) logits of tokens in prompt and output."""
    presence_penalty: float = 0.0
    """-2 to 2. Taken once from the logit of each token that the output holds."""
    frequency_penalty: float = 0.0
    """-2 to 2. Taken from a token's logit for each time that the output holds it."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of token ids, each -100 to 100."""
    allowed_token_ids: Sequence[int] | None = None
    """Only these may be sampled."""
    bad_words: Sequence[str] = ()
    """Texts that must not be produced; the front end turns them into `bad_word_ids`."""
    bad_word_ids: Sequence[Sequence[int]] = ()
    """Token sequences whose last token is never sampled where the output ends in the others."""
    seed: int | None = None
    """Same seed, same tokens, whatever else runs. None: the front end draws one."""
    max_tokens: int | None = 16
    """Most tokens to produce, at least 1. None: as many as the context holds."""
    min_tokens: int = 0
    """No end or stop token is sampled before this many output tokens."""
    stop: Sequence[str] = ()
    """Texts that end the output; found by the front end, also across tokens."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the output, also under `ignore_eos`."""
    ignore_eos: bool = False
    """Do not end at the model's own end tokens."""
    logprobs: int | None = None
    """Log-probabilities of each output token and of this many most probable ones, 0 to 20."""
    prompt_logprobs: int | None = None
    """The same for prompt tokens; such a request does not read the prefix cache."""
    structured_outputs: StructuredOutputs | None = None
    """The form that the output must have; the front end turns it into `grammar`."""
    grammar: str | None = None
    """What the output is derived from, in llguidance's own words."""
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _normalize(self)
        _check_numbers(self)
        _check_token_ids(self)
        _check_texts(self)
        _check_structure(self)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def needs_history(self) -> bool:
        """Whether sampling looks at the tokens before, not only at the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or bool(self.bad_word_ids)
            or self.grammar is not None
        )

    @property
    def num_guarded(self) -> int:
        """Output tokens that no end token ends. A grammar that is complete sooner ends all the
        same, and until then the sampler bans end tokens itself."""
        return 0 if self.grammar is not None else self.min_tokens

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check every token id against the model's vocabulary.

        Raises:
            InvalidRequest: an id is not below `vocab_size`.
        """
        named: tuple[tuple[str, Iterable[int]], ...] = (
            ("logit_bias", self.logit_bias or ()),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("stop_token_ids", self.stop_token_ids),
            ("bad_word_ids", (token for word in self.bad_word_ids for token in word)),
        )
        for name, ids in named:
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise InvalidRequest(
                        f"{name} holds token id {token}; the model's vocabulary has ids "
                        f"0 to {vocab_size - 1}",
                        param=name,
                    )


def _normalize(params: SamplingParams) -> None:
    """Turn lists into tuples, one stop string into a tuple, JSON's text keys into ids."""
    if isinstance(params.stop, str):
        force_setattr(params, "stop", (params.stop,))
    for name in ("stop", "bad_words", "stop_token_ids", "allowed_token_ids", "bad_word_ids"):
        value = getattr(params, name)
        if value is None and name != "allowed_token_ids":
            force_setattr(params, name, ())
        elif isinstance(value, list | set | frozenset):
            force_setattr(params, name, tuple(value))
    for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
        _as_float(params, name)
    for name in ("presence_penalty", "frequency_penalty"):
        _as_float(params, name)
    words: object = params.bad_word_ids
    if isinstance(words, tuple):
        as_tuples = (tuple(word) if isinstance(word, list) else word for word in words)
        force_setattr(params, "bad_word_ids", tuple(as_tuples))
    top_k: object = params.top_k
    if top_k == -1 and isinstance(top_k, int):
        force_setattr(params, "top_k", 0)
    if params.logit_bias is not None:
        force_setattr(params, "logit_bias", _bias_by_id(params.logit_bias))


def _as_float(params: SamplingParams, name: str) -> None:
    value = getattr(params, name)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= INT32_MAX:
        force_setattr(params, name, float(value))


_TEXT_ID = re.compile("-?[0-9]{1,10}")


def _bias_by_id(given: object) -> dict[int, float]:
    if not isinstance(given, dict):
        raise wrong_value("logit_bias", "a map from token id to a number", given)
    bias: dict[int, float] = {}
    for key, value in given.items():
        token = int(key) if isinstance(key, str) and _TEXT_ID.fullmatch(key) else key
        if not _is_id(token):
            raise wrong_value("logit_bias", "a map with token ids as keys", key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise wrong_value("logit_bias", "a map with numbers as values", value)
        if not -100.0 <= value <= 100.0:
            raise wrong_value("logit_bias", "a map with values from -100 to 100", value)
        bias[token] = float(value)
    return bias


def _is_id(value: object) -> bool:
    """Whether a column of ids can hold it; `check_vocabulary` knows which ids there are."""
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return -INT32_MAX <= value <= INT32_MAX


def _check_float(
    params: SamplingParams, name: str, low: float, high: float, *, open_low: bool = False
) -> None:
    value = getattr(params, name)
    brackets = "(" if open_low else "["
    wanted = f"a number in {brackets}{low:g}, {high:g}]"
    if not isinstance(value, float) or not math.isfinite(value):
        raise wrong_value(name, wanted, value)
    if value > high or value < low or (open_low and value == low):
        raise wrong_value(name, wanted, value)


def _check_int(params: SamplingParams, name: str, low: int, high: int) -> None:
    value = getattr(params, name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise wrong_value(name, f"an integer from {low} to {high}", value)


def _check_numbers(params: SamplingParams) -> None:
    _check_int(params, "n", 1, MAX_N)
    _check_float(params, "temperature", 0.0, 2.0)
    _check_float(params, "top_p", 0.0, 1.0, open_low=True)
    _check_int(params, "top_k", 0, INT32_MAX)
    _check_float(params, "min_p", 0.0, 1.0)
    _check_float(params, "repetition_penalty", LEAST_REPETITION_PENALTY, 100.0)
    _check_float(params, "presence_penalty", -2.0, 2.0)
    _check_float(params, "frequency_penalty", -2.0, 2.0)
    if params.seed is not None:
        # Output i of n uses seed + i.
        _check_int(params, "seed", -MAX_SEED, MAX_SEED - (params.n - 1))
    if params.max_tokens is not None:
        _check_int(params, "max_tokens", 1, INT32_MAX)
    _check_int(params, "min_tokens", 0, INT32_MAX)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequest(
            f"min_tokens={params.min_tokens} is above max_tokens={params.max_tokens}",
            param="min_tokens",
        )
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            _check_int(params, name, 0, MAX_LOGPROBS)
    for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
        if not isinstance(getattr(params, name), bool):
            raise wrong_value(name, "true or false", getattr(params, name))
    if params.n > 1 and params.is_greedy:
        raise InvalidRequest(
            f"n={params.n} with temperature {params.temperature:g} gives {params.n} equal "
            "outputs; raise the temperature or ask for n=1",
            param="n",
        )


def _check_ids(name: str, ids: object, most: int) -> None:
    if not isinstance(ids, tuple) or not all(_is_id(token) for token in ids):
        raise wrong_value(name, "a list of token ids", ids)
    if len(ids) > most:
        raise InvalidRequest(f"{name} has {len(ids)} entries, at most {most} may be", param=name)


def _check_token_ids(params: SamplingParams) -> None:
    _check_ids("stop_token_ids", params.stop_token_ids, MAX_STOP_TOKEN_IDS)
    if params.allowed_token_ids is not None:
        _check_ids("allowed_token_ids", params.allowed_token_ids, INT32_MAX)
        if not params.allowed_token_ids:
            raise wrong_value("allowed_token_ids", "at least one token id", [])
    if params.logit_bias is not None and len(params.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(
            f"logit_bias has {len(params.logit_bias)} entries, at most {MAX_LOGIT_BIAS} may be",
            param="logit_bias",
        )
    if not isinstance(params.bad_word_ids, tuple):
        raise wrong_value("bad_word_ids", "a list of token id sequences", params.bad_word_ids)
    for word in params.bad_word_ids:
        _check_ids("bad_word_ids", word, 128)
        if not word:
            raise wrong_value("bad_word_ids", "sequences of at least one id", word)


def _check_texts(params: SamplingParams) -> None:
    for name, most in (("stop", MAX_STOP_STRINGS), ("bad_words", MAX_BAD_WORDS)):
        texts = getattr(params, name)
        if not isinstance(texts, tuple) or not all(isinstance(text, str) for text in texts):
            raise wrong_value(name, "a text or a list of texts", texts)
        if not all(texts):
            raise wrong_value(name, "made of non-empty texts", "")
        for text in texts:
            if not text.isascii() and any("\ud800" <= mark <= "\udfff" for mark in text):
                raise wrong_value(name, "made of valid Unicode texts", text)
        if len(texts) > most:
            raise InvalidRequest(
                f"{name} has {len(texts)} entries, at most {most} may be", param=name
            )


def _check_structure(params: SamplingParams) -> None:
    structure: object = params.structured_outputs
    if structure is not None and not isinstance(structure, StructuredOutputs):
        raise wrong_value("structured_outputs", "StructuredOutputs", structure)
    grammar: object = params.grammar
    if grammar is None:
        return
    if not isinstance(grammar, str) or not grammar.strip():
        raise wrong_value("grammar", "a non-empty text", grammar)
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(
            f"grammar has {len(grammar)} characters, at most {MAX_GRAMMAR_CHARS} may be",
            param="grammar",
        )
