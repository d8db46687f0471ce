"""What a client submits, what it gets back, and why a request was refused."""

from enum import IntEnum

import numpy as np
from msgspec import Struct

from scheduler.arrays import (
    NO_FLOAT32,
    NO_INT32,
    NO_UINT8,
    Float32Array,
    Int32Array,
    Uint8Array,
    int32,
)
from scheduler.plan import LogprobRows
from scheduler.sampling import SamplingParams


class Finish(IntEnum):
    """Why an output ended; 0 means that it goes on."""

    NOT_YET = 0
    STOP = 1
    """An end token of the model or one of `stop_token_ids` (the last token says which)."""
    LENGTH = 2
    """max_tokens, the context length, or the size of the KV pool."""
    ABORT = 3
    TIMEOUT = 4
    """The request's `timeout_s` passed; tokens sent so far stand."""
    ERROR = 5


class Request(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="request"
):
    """One prompt to continue with one output (`n` outputs are n requests of the front end).

    A continuation is a request that was taken before, by an engine or a connection that is gone:
    `output` or `age_s` says so. It goes on as if nothing had been, since a token depends on what
    is before it, on the seed and on its position alone; and it is never refused for want of room.
    """

    handle: int
    """Chosen by the client, unique among its live requests; answers carry it."""
    prompt: Int32Array
    """Token ids, at least one."""
    sampling: SamplingParams
    end_ids: tuple[int, ...] = ()
    """The model's end tokens; `ignore_eos` switches them off."""
    priority: int = 0
    """Lower starts first; needs the `priority` policy."""
    cache_salt: str | None = None
    """Prefixes are reused only between requests of the same salt."""
    timeout_s: float | None = None
    """Seconds from its first arrival after which the request ends wherever it is."""
    deaths: tuple[str, ...] = ()
    """Of a continuation: failures of worker groups while another engine had it computed, with no
    progress in between, as that engine has told (`Suspected`)."""
    label: str = ""
    """The client's own name for it, for logs; need not be unique."""
    output: Int32Array = NO_INT32
    """Tokens that it was answered with already. They count as output in all that is asked
    (`max_tokens`, penalties, grammar, …), and are not sent again."""
    age_s: float = 0.0
    """Seconds since it was first submitted: it keeps its place in the queue, and its deadline."""

    @property
    def is_continuation(self) -> bool:
        return len(self.output) > 0 or self.age_s > 0


class Abort(Struct, frozen=True, tag_field="type", tag="abort"):
    """Forget these requests of mine; unknown handles are ignored. Not answered."""

    handle: Int32Array


class Rejection(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="rejection"
):
    """The request was not accepted and nothing of it was kept."""

    handle: int
    reason: str
    """One of: invalid, too_long, queue_full, timeout, shutting_down, no_workers."""
    message: str
    """What was wanted, what there is, which limit, and what to change."""
    param: str | None = None
    retry_after_s: float | None = None


class Started(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sent with the first token of a request; not with those of a continuation's `output`."""

    handle: int
    num_cached_tokens: int = 0
    """Prompt tokens whose K/V were taken from the prefix cache."""
    queue_s: float = 0.0
    """Seconds from arrival to the first slice of the prompt."""
    prefill_s: float = 0.0
    """Seconds from then to the first token."""
    chunk_tokens: Int32Array = NO_INT32
    """[C] tokens of each part of a prompt that took several steps"""
    chunk_s: Float32Array = NO_FLOAT32
    """[C] seconds that each took; together `prefill_s`"""


class Ended(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Figures of a request that ended by itself, sent with its last tokens."""

    handle: int
    num_preemptions: int = 0
    message: str = ""
    """Filled for `Finish.ERROR` and `Finish.TIMEOUT`, and for `Finish.ABORT` if it was the engine
    that gave the request up."""


class Suspected(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is held against a request from now on, for its next engine to know."""

    handle: int
    deaths: tuple[str, ...] = ()
    """Failures of worker groups while it was computed; none: it has got further since."""


class TokenBatch(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="tokens"
):
    """All news of one step for one client. Row i of the columns speaks of one request."""

    handle: Int32Array
    """[N] whose news"""
    count: Int32Array = NO_INT32
    """[N] tokens of each row; an empty column means one each"""
    token: Int32Array = NO_INT32
    """[sum of count] token ids, row after row"""
    finish: Uint8Array = NO_UINT8
    """[N] `Finish` codes; an empty column means that no row ends"""
    started: tuple[Started, ...] = ()
    ended: tuple[Ended, ...] = ()
    suspected: tuple[Suspected, ...] = ()
    logprobs: LogprobRows | None = None
    """Rows refer to rows of `handle`; only for requests that asked."""


def failed_batch(handle: int, message: str) -> TokenBatch:
    """The news that one request ends with an error."""
    return TokenBatch(
        handle=int32([handle]),
        count=int32([0]),
        finish=np.array([Finish.ERROR], dtype=np.uint8),
        ended=(Ended(handle=handle, message=message),),
    )
