"""What a set of operations answers that draws a token per row of logits by a kernel of its own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Draws:
    """What was chosen; of a device, nothing of it has been waited for."""

    token: Tensor
    """[R] int64"""
    best: Tensor
    """[R] float32, the largest logit; NaN if the row holds one; -inf if all ids are banned"""


Draw: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Draws]
"""(logits [R, V], then [R] each: temperature, 0 for greedy; top_k, V for none; top_p; min_p;
seed; position) to one token per row, as `worker.sampler` defines it."""
