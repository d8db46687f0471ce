"""Draws a token per row of logits with the native kernels (kernels/sampling.h), unsorted."""

import torch
from torch import Tensor

from worker.ops.draws import Draws
from worker.ops.native.structs import DrawArgs, pointer
from worker.ops.native.team import Team


def draw(
    team: Team,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Draws:
    """Choose one token per row, on all threads of the team.

    A row whose temperature is 0 or whose logits are all -inf gets its most probable token, of
    equal ones the lowest id. Weights are float32 and sums float64, in another order than
    torch's, so a token may differ where the drawn number lies within about 1e-6 of the border
    between two.

    Shapes (R rows, V ids):
        logits: [R, V] float32, contiguous in V
        temperature: [R] float32, 0 or at least `scheduler.sampling.GREEDY_BELOW`
        top_k: [R] int64, at least 1; V or more keeps all
        top_p: [R] float64 in (0, 1]
        min_p: [R] float64 in [0, 1]
        seed: [R] int64
        position: [R] int64, of the token to be drawn
    """
    assert logits.dtype == torch.float32, f"logits are {logits.dtype}"
    assert logits.stride(1) == 1, "logits must be contiguous in the vocabulary"
    num_rows, vocab_size = logits.shape
    token = torch.empty(num_rows, dtype=torch.int64)
    best = torch.empty(num_rows)
    columns = [column.contiguous() for column in (temperature, top_k, top_p, min_p, seed, position)]
    types = [column.dtype for column in columns]
    long, double = torch.int64, torch.float64
    assert types == [torch.float32, long, double, double, long, long], f"columns are {types}"
    team.draw(
        DrawArgs(
            pointer(logits),
            num_rows,
            vocab_size,
            logits.stride(0),
            *map(pointer, columns),
            pointer(token),
            pointer(best),
        )
    )
    return Draws(token, best)
