"""What a worker group is told to compute in one step, and what it answers.

Columns of plain integers: row i of each array speaks of the same slice. No tensors, and
no timestamps, since hosts' clocks differ. A plan is a difference: both sides keep the
table of running sequences (slot -> blocks, tokens) and the plan says only what changed.
Applied in this order: releases, admissions, new blocks, slices.
"""

from msgspec import Struct

from scheduler.arrays import NO_BOOL, NO_INT32, BoolArray, Float32Array, Int32Array
from scheduler.sampling import SamplingParams


class Admission(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sequence that takes a slot: a new one, or one that resumes after preemption."""

    slot: int
    sampling: SamplingParams
    """With `seed` set, unless greedy. A random number depends on (seed, position) alone."""
    num_prompt: int
    """Tokens that belong to the prompt; later ones are output (penalties, min_tokens)."""
    blocks: Int32Array
    """The first blocks of its table, cached prefix first."""
    num_cached: int = 0
    """Tokens whose K/V are in the pool already; the first slice starts here."""
    end_ids: tuple[int, ...] = ()
    """Never sampled before `sampling.min_tokens` output tokens (with `stop_token_ids`)."""
    history: Int32Array = NO_INT32
    """Tokens [0, num_cached), if `sampling.needs_history`; else empty."""


class StepPlan(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="plan"):
    """One step of one group: S slices of consecutive tokens, one per sequence named.

    A prefill chunk has many tokens and a decode has one; nothing else tells them apart.
    """

    epoch: int
    step: int
    """Rises by one from 1 in each epoch."""
    released: Int32Array = NO_INT32
    """Slots whose sequences are gone."""
    admitted: tuple[Admission, ...] = ()
    block_slot: Int32Array = NO_INT32
    """[B] the slot whose table each new block is appended to"""
    block: Int32Array = NO_INT32
    """[B] the new blocks"""
    slot: Int32Array = NO_INT32
    """[S] which running sequence"""
    start: Int32Array = NO_INT32
    """[S] position of the first token; K/V of [0, start) are in the pool"""
    count: Int32Array = NO_INT32
    """[S] tokens in the slice, at least 1; an empty column means one each"""
    samples: BoolArray = NO_BOOL
    """[S] whether the slice's last position yields a token; an empty column means all do"""
    given: Int32Array = NO_INT32
    """[S] how many of the slice's tokens `token` carries; the rest, at most the last one, is
    the token that the group sampled last for this slot (with one pipeline stage only, since the
    first one samples nothing); an empty column means none"""
    token: Int32Array = NO_INT32
    """[sum of given] tokens, slice after slice"""


class LogprobRows(Struct, frozen=True, kw_only=True):
    """Log-probabilities (natural, of the raw logits) of R tokens, with alternatives.

    Column 0 of each row is the token itself, columns 1 to W-1 the most probable tokens in
    falling order; columns beyond what the request asked for are id -1.
    """

    row: Int32Array
    """[R] which row of the message's slices (or handles)"""
    position: Int32Array
    """[R] position in the sequence of the token spoken of"""
    width: int
    """W"""
    token: Int32Array
    """[R * W]"""
    logprob: Float32Array
    """[R * W]"""
    rank: Int32Array
    """[R] 1 for the most probable token"""


class FailedSlice(Struct, frozen=True, kw_only=True):
    """A sequence that cannot go on, through no fault of the group's; its token means nothing."""

    row: int
    """Which of the plan's slices"""
    message: str


class StepResult(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="result"
):
    """The answer to one plan, from the first rank of the last stage (with one stage, rank 0)."""

    epoch: int
    step: int
    token: Int32Array = NO_INT32
    """[slices that sample] tokens, in the order of the slices"""
    logprobs: LogprobRows | None = None
    """Of sampled tokens and of prompt tokens, in the order of the slices"""
    failed: tuple[FailedSlice, ...] = ()
    """Slices that sample, but have no token that they may give"""
    compute_s: float = 0.0
    """Seconds from having read the plan to having the tokens"""
    forward_s: float = 0.0
    """Of these, until the model's layers had run (a GPU: were on their way); the rest went into
    logits, choosing tokens, and on a GPU waiting for it"""
