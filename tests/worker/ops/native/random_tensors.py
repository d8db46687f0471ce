"""Seeded tensors, and how near a native result must be to the oracle's."""

import torch
from torch import Tensor

NEAR = {"atol": 2e-5, "rtol": 1e-5}
"""Sums of up to a few hundred float32 numbers near 1, in another order."""


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, **NEAR)
