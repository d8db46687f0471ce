"""Has a sequence finished, and why. For one token, and for columns of them."""

import numpy as np

from scheduler.arrays import IndexArray, Int32Array, Uint8Array
from scheduler.errors import RequestFailed
from scheduler.request import Finish, Request
from scheduler.sequences import RunningColumns, Sequence


def end_tokens(request: Request) -> frozenset[int]:
    """Tokens that end a sequence: the model's own unless ignored, and the caller's always.

    The end of a grammar is not ignored: its sampler gives an end token where nothing else may
    follow.
    """
    sampling = request.sampling
    is_ignored = sampling.ignore_eos and sampling.grammar is None
    return frozenset(() if is_ignored else request.end_ids) | frozenset(sampling.stop_token_ids)


def finish_of_token(sequence: Sequence, token: int, length: int) -> Finish:
    """Why the sequence ends with `token` as its `length`-th token, if it does."""
    min_len = sequence.num_prompt + sequence.request.sampling.num_guarded
    if token in sequence.end_ids and length > min_len:
        return Finish.STOP
    return Finish.LENGTH if length >= sequence.limit else Finish.NOT_YET


def finish_of_output(sequence: Sequence) -> Finish:
    """Why a sequence that arrives with output has ended already, if it has."""
    length = len(sequence.tokens)
    if length == sequence.num_prompt:
        return Finish.NOT_YET
    return finish_of_token(sequence, int(sequence.tokens[-1]), length)


def finish_of_tokens(
    running: RunningColumns, slots: IndexArray, tokens: Int32Array, lengths: Int32Array
) -> Uint8Array:
    """`finish_of_token` for one new token of each slot.

    Shapes: slots, tokens, lengths and the result are [N].
    Raises:
        RequestFailed: one of them has an end that cannot be told.
    """
    finish = np.zeros(len(slots), dtype=np.uint8)
    may_have = lengths >= running.fixed(slots).limit
    may_have |= running.may_end.take(tokens, mode="clip")
    for row in may_have.nonzero()[0].tolist():
        sequence = running.at(int(slots[row]))
        try:
            finish[row] = finish_of_token(sequence, int(tokens[row]), int(lengths[row]))
        except Exception as error:
            raise RequestFailed(sequence.client, sequence.request.handle) from error
    return finish
