"""What a group's answer means: tokens for their sequences, and who has ended."""

import math
from dataclasses import dataclass

import numpy as np

from scheduler.arrays import (
    NO_FLOAT32,
    NO_INT32,
    BoolArray,
    Float64Array,
    IndexArray,
    Int32Array,
    Int64Array,
    int32,
)
from scheduler.group import Group, Issued
from scheduler.outbox import Outbox
from scheduler.plan import LogprobRows, StepResult
from scheduler.request import Ended, Finish, Started
from scheduler.sequences import RunningColumns, Sequence
from scheduler.stopping import finish_of_token, finish_of_tokens


@dataclass(frozen=True, slots=True)
class Settled:
    """The outcome of one step. The sequences in `finished` are still in their places."""

    outbox: Outbox
    finished: list[tuple[Sequence, Finish]]
    started: list[Sequence]
    """Sequences whose first token this is."""
    gaps_s: Float64Array
    """Time since the token before, of each token; NaN for a first one."""
    num_dropped: int
    """Tokens of sequences that had ended meanwhile."""


def settle(group: Group, result: StepResult, now: float) -> Settled:
    """Take the answer to the group's oldest plan.

    Raises:
        ProtocolError: it is no answer to that plan.
    """
    issued, runs = group.settle(result)
    for sequence, tokens_done in issued.prompts:
        sequence.chunks.append((tokens_done, now))
    slots, serials, lengths, tokens = issued.slot, issued.serial, issued.end + 1, result.token
    if issued.num_samples < len(slots):
        sampled = issued.samples.nonzero()[0]
        slots, serials, lengths = slots[sampled], serials[sampled], lengths[sampled]
        runs = None if runs is None else runs[sampled]
    reasons = {int(issued.serial[failed.row]): failed.message for failed in result.failed}
    late: list[tuple[Sequence, Finish]] = []
    num_dropped = 0
    if runs is not None:
        late = _late(group, serials[~runs], tokens[~runs], lengths[~runs], reasons)
        num_dropped = len(runs) - int(np.count_nonzero(runs)) - len(late)
        slots, serials, lengths = slots[runs], serials[runs], lengths[runs]
        tokens = tokens[runs]
    outbox, gaps_s = _store(group.running, slots, tokens, lengths, now)
    if reasons:
        _leave_out(outbox, np.isin(serials, list(reasons)))
    rows = group.running
    finished = [
        (rows.at(int(slots[row])), Finish(int(outbox.finish[row])))
        for row in outbox.finish.nonzero()[0].tolist()
    ]
    is_first = np.isnan(gaps_s)
    started: list[Sequence] = []
    if np.count_nonzero(is_first):
        started = [rows.at(slot) for slot in slots[is_first].tolist()]
    if late:
        outbox = _with_late(outbox, late)
        gaps_s = np.append(gaps_s, [now - s.last_token_at for s, _ in late])
        finished += [(s, f) for s, f in late if f]
        started += [s for s, _ in late if math.isnan(s.last_token_at)]
        for sequence, _ in late:
            sequence.last_token_at = now
    if reasons:
        started = [s for s in started if s.serial not in reasons]
    outbox.started += [(s.client, _started(s, now)) for s in started]
    outbox.ended += [(s.client, _ended(s, reasons.get(s.serial, ""))) for s, _ in finished]
    if result.logprobs is not None:
        _attach_logprobs(outbox, group, issued, result.logprobs)
    return Settled(outbox, finished, started, gaps_s, num_dropped)


def _store(
    rows: RunningColumns, slots: IndexArray, tokens: Int32Array, lengths: Int32Array, now: float
) -> tuple[Outbox, Float64Array]:
    """Append one token to each of the slots.

    Returns the news of them, and the time since each one's token before; NaN for a first one.
    """
    rows.store(slots, lengths - 1, tokens)
    rows.confirmed[slots] = lengths
    gaps_s = now - rows.token_at.take(slots)
    rows.token_at[slots] = now
    fixed = rows.fixed(slots)
    outbox = Outbox(
        client=fixed.client,
        handle=fixed.handle,
        token=tokens,
        finish=finish_of_tokens(rows, slots, tokens, lengths),
    )
    return outbox, gaps_s


def _leave_out(outbox: Outbox, has_failed: BoolArray) -> None:
    """These rows end without the token that was sampled for them."""
    outbox.finish[has_failed] = Finish.ERROR
    outbox.token = outbox.token[~has_failed]
    outbox.count = (~has_failed).astype(np.int32)


def _late(
    group: Group,
    serials: Int64Array,
    tokens: Int32Array,
    lengths: Int32Array,
    reasons: dict[int, str],
) -> list[tuple[Sequence, Finish]]:
    """Tokens of sequences preempted meanwhile: still good, since they depend on nothing else.

    Args:
        reasons: by serial, of sequences that have failed and got none.
    """
    late: list[tuple[Sequence, Finish]] = []
    for serial, token, length in zip(
        serials.tolist(), tokens.tolist(), lengths.tolist(), strict=True
    ):
        if serial not in group.leaving:
            continue
        sequence = group.leaving[serial][1]
        assert len(sequence.tokens) == length - 1, "a late token must be the next one"
        if serial in reasons:
            late.append((sequence, Finish.ERROR))
            continue
        sequence.tokens = np.append(sequence.tokens, np.int32(token))
        late.append((sequence, finish_of_token(sequence, token, length)))
    return late


def _with_late(outbox: Outbox, late: list[tuple[Sequence, Finish]]) -> Outbox:
    last = int32([s.tokens[-1] for s, f in late if f is not Finish.ERROR])
    count = int32([f is not Finish.ERROR for _, f in late])
    return Outbox(
        client=np.concatenate([outbox.client, int32([s.client for s, _ in late])]),
        handle=np.concatenate([outbox.handle, int32([s.request.handle for s, _ in late])]),
        count=np.concatenate([outbox.counts(), count]),
        token=np.concatenate([outbox.token, last]),
        finish=np.concatenate([outbox.finish, np.array([f for _, f in late], dtype=np.uint8)]),
    )


def _started(sequence: Sequence, now: float) -> Started:
    assert sequence.started_at is not None
    chunk_tokens, chunk_s = NO_INT32, NO_FLOAT32
    chunks = sequence.chunks
    if chunks and chunks[-1][1] < now:  # a part of one token is planned like a decode
        chunks.append((1, now))
    if len(chunks) > 1:
        chunk_tokens = int32([count for count, _ in chunks])
        begins = [sequence.started_at, *(at for _, at in chunks)]
        chunk_s = np.array(
            [at - begin for (_, at), begin in zip(chunks, begins, strict=False)], dtype=np.float32
        )
    return Started(
        handle=sequence.request.handle,
        num_cached_tokens=sequence.num_cached_tokens,
        queue_s=sequence.started_at - sequence.arrival,
        prefill_s=now - sequence.started_at,
        chunk_tokens=chunk_tokens,
        chunk_s=chunk_s,
    )


def _ended(sequence: Sequence, message: str) -> Ended:
    return Ended(
        handle=sequence.request.handle,
        num_preemptions=sequence.num_preemptions,
        message=message,
    )


def _attach_logprobs(outbox: Outbox, group: Group, issued: Issued, given: LogprobRows) -> None:
    """Point the rows of log-probabilities at rows of the outbox.

    Prompt positions that were sent before a preemption are left out. A chunk that samples
    nothing gets a row without a token.
    """
    row_of = {
        (client, handle): row
        for row, (client, handle) in enumerate(
            zip(outbox.client.tolist(), outbox.handle.tolist(), strict=True)
        )
    }
    extra: list[tuple[int, int]] = []
    keep: list[int] = []
    target: list[int] = []
    for at, (row, position) in enumerate(
        zip(given.row.tolist(), given.position.tolist(), strict=True)
    ):
        sequence = _sequence_of(group, issued, row)
        if sequence is None or not _is_news(sequence, position):
            continue
        key = (sequence.client, sequence.request.handle)
        if key not in row_of:
            row_of[key] = len(outbox.client) + len(extra)
            extra.append(key)
        keep.append(at)
        target.append(row_of[key])
    if extra:
        none = np.zeros(len(extra), dtype=np.int32)
        outbox.count = np.concatenate([outbox.counts(), none])
        outbox.client = np.concatenate([outbox.client, int32([key[0] for key in extra])])
        outbox.handle = np.concatenate([outbox.handle, int32([key[1] for key in extra])])
        outbox.finish = np.concatenate([outbox.finish, none.astype(np.uint8)])
    outbox.logprobs = LogprobRows(
        row=int32(target),
        position=given.position[keep],
        width=given.width,
        token=given.token.reshape(-1, given.width)[keep].reshape(-1),
        logprob=given.logprob.reshape(-1, given.width)[keep].reshape(-1),
        rank=given.rank[keep],
    )


def _sequence_of(group: Group, issued: Issued, row: int) -> Sequence | None:
    slot, serial = int(issued.slot[row]), int(issued.serial[row])
    if group.running.serial[slot] == serial:
        return group.running.at(slot)
    return group.leaving[serial][1] if serial in group.leaving else None


def _is_news(sequence: Sequence, position: int) -> bool:
    """Whether the value was not sent before; prompt positions come in order."""
    if position >= sequence.num_prompt:
        return True
    if position <= sequence.num_reported:
        return False
    sequence.num_reported = position
    return True
