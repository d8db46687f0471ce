"""Log-probabilities of tokens, of the logits as the model gave them.

Natural logarithm, float32, before temperature, penalties and filters. Alternatives and
ranks follow the fixed order of `worker.ranking`, so the token of rank r, if r is not above
the number of alternatives asked for, is also alternative r.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scheduler.arrays import Float32Array, Int32Array, int32
from scheduler.plan import LogprobRows
from worker.ranking import top

SLAB_ROWS = 64
"""Rows scored at once. More only raises the memory of the table of log-probabilities."""
NO_TOKEN = -1


def score(
    logits: Tensor,
    tokens: Int32Array | npt.NDArray[np.int64],
    num_top: Int32Array,
    row: Int32Array,
    position: Int32Array,
) -> LogprobRows:
    """Log-probability and rank of one token per row, with the row's most probable tokens.

    Args:
        logits: [R, V] float, without NaN
        tokens: [R] the token that stands after each row's context: the one sampled, or for
            a prompt the next prompt token
        num_top: [R] alternatives wanted, 0 to V
        row, position: [R] taken over into the answer
    """
    width = min(int(num_top.max(initial=0)), logits.shape[1])
    chosen = torch.from_numpy(np.asarray(tokens, dtype=np.int64)).to(logits.device)
    parts = [
        _score_slab(logits[start : start + SLAB_ROWS], chosen[start : start + SLAB_ROWS], width)
        for start in range(0, len(tokens), SLAB_ROWS)
    ]
    ids = np.concatenate([part[0] for part in parts]) if parts else np.empty((0, 1), np.int32)
    values = np.concatenate([part[1] for part in parts]) if parts else np.empty((0, 1), np.float32)
    ranks = np.concatenate([part[2] for part in parts]) if parts else np.empty(0, np.int32)
    unasked = np.arange(ids.shape[1]) > num_top[:, None]
    ids[unasked] = NO_TOKEN
    values[unasked] = -np.inf
    return LogprobRows(
        row=int32(row),
        position=int32(position),
        width=ids.shape[1],
        token=ids.reshape(-1),
        logprob=values.reshape(-1),
        rank=ranks,
    )


def joined(parts: Sequence[LogprobRows]) -> LogprobRows | None:
    """All parts as one, by row and then by position; None if there is nothing."""
    parts = [part for part in parts if len(part.row)]
    if not parts:
        return None
    row = np.concatenate([part.row for part in parts])
    position = np.concatenate([part.position for part in parts])
    order = np.lexsort((position, row))
    width = max(part.width for part in parts)
    token = np.concatenate([_widened(part.token, part.width, width, NO_TOKEN) for part in parts])
    logprob = np.concatenate([_widened(part.logprob, part.width, width, -np.inf) for part in parts])
    return LogprobRows(
        row=row[order],
        position=position[order],
        width=width,
        token=token[order].reshape(-1),
        logprob=logprob[order].reshape(-1),
        rank=np.concatenate([part.rank for part in parts])[order],
    )


def _score_slab(
    logits: Tensor, tokens: Tensor, width: int
) -> tuple[Int32Array, Float32Array, Int32Array]:
    """ids [R, 1 + width], their log-probabilities, and ranks [R] of the tokens."""
    logits = logits.float()
    table = torch.log_softmax(logits, dim=-1)
    ids = torch.cat((tokens[:, None], top(logits, width)), dim=1) if width else tokens[:, None]
    values = table.gather(1, ids)
    own = logits.gather(1, tokens[:, None])
    places = torch.arange(logits.shape[1], device=logits.device)
    is_before = (logits > own) | ((logits == own) & (places < tokens[:, None]))
    ranks = 1 + is_before.sum(dim=-1, dtype=torch.int32)
    return ids.int().cpu().numpy(), values.cpu().numpy(), ranks.cpu().numpy()


def _widened(
    flat: npt.NDArray[np.generic], width: int, wanted: int, filler: float
) -> npt.NDArray[np.generic]:
    return np.pad(flat.reshape(-1, width), ((0, 0), (0, wanted - width)), constant_values=filler)
