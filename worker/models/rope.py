"""Rotary position embedding: from a config's words to a table of cosines and sines.

Every scaling in use is a function of the position alone, so a token's key never depends on
how its prompt was cut into slices. Where an original definition depends on the length of the
sequence, the field that says so names what is done instead.
"""

import math

import torch
from torch import Tensor

from worker.models.rope_spec import RopeSpec

def rope_table(rope: RopeSpec, head_dim: int, max_positions: int) -> Tensor:
    """Cosines, then sines, of every position's angles.

    Angles are products of float32 numbers, as in the training of the models.

    Returns:
        [max_positions, head_dim] float32
    """
    positions = torch.arange(max_positions, dtype=torch.float32)
    if rope.kind == "dynamic":
        frequencies = _dynamic_frequencies(rope, head_dim, max_positions)
    else:
        frequencies = _frequencies(rope, head_dim, max_positions)
    angles = positions[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(_attention_factor(rope))


def _exponents(head_dim: int) -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim


def _frequencies(rope: RopeSpec, head_dim: int, max_positions: int) -> Tensor:
    """[head_dim / 2] radians per position."""
    plain = 1.0 / rope.theta ** _exponents(head_dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "yarn":
        return _yarn(rope, head_dim)
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "longrope":
        is_long = max_positions > rope.original_max_positions
        factors = torch.tensor(rope.long_factor if is_long else rope.short_factor)
        return 1.0 / (factors * rope.theta ** _exponents(head_dim))
    return plain


def _dynamic_frequencies(rope: RopeSpec, head_dim: int, max_positions: int) -> Tensor:
    """[max_positions, head_dim / 2]: each position as if it were the sequence's last.

    The base grows with the length of the sequence once that passes the original context; a
    key is rotated once, by the length it had when its token came.
    """
    lengths = torch.arange(1, max_positions + 1, dtype=torch.float64)
    lengths.clamp_(min=rope.original_max_positions)
    stretch = rope.factor * lengths / rope.original_max_positions - (rope.factor - 1)
    bases = rope.theta * stretch ** (head_dim / (head_dim - 2))
    return 1.0 / bases.to(torch.float32)[:, None] ** _exponents(head_dim)


def _yarn(rope: RopeSpec, head_dim: int) -> Tensor:
    """Source: Peng et al. 2023 (arXiv:2309.00071), sections 3.2 and 3.3."""
    powers = rope.theta ** _exponents(head_dim)

    def dimension_of(rotations: float) -> float:
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1.0 - ramp.clamp(0.0, 1.0)
    return (1.0 / (rope.factor * powers)) * (1 - kept) + (1.0 / powers) * kept


def _llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Long waves are slowed by the factor, short ones kept, those between interpolated.

    Source: Llama 3.1, Grattafiori et al. 2024 (arXiv:2407.21783), section 3.4.2, and the
    reference code published with it.
    """
    context = rope.original_max_positions
    wavelengths = 2 * math.pi / plain
    smooth = (context / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * plain / rope.factor + smooth * plain
    scaled = torch.where(wavelengths > context / rope.low_freq_factor, plain / rope.factor, between)
    return torch.where(wavelengths < context / rope.high_freq_factor, plain, scaled)


def _attention_factor(rope: RopeSpec) -> float:
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    if rope.kind == "longrope":
        # Source: Ding et al. 2024 (arXiv:2402.13753), as published with Phi-3.
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_positions))
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
    return _yarn_scale(rope.factor, 1.0)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0
