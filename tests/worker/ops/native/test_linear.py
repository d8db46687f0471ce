"""Linear layers of the native set, against the oracle."""

import pytest
import torch

from tests.worker.ops.native.random_tensors import assert_near, random
from worker.ops.cpu import CpuOperations
from worker.ops.reference import ReferenceOperations

ORACLE = ReferenceOperations()
FORMATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("rows", [0, 1, 7, 64, 200])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_layers_agree(
    ops: CpuOperations, dtype: torch.dtype, rows: int, has_bias: bool
) -> None:
    weight = (random(37, 48) / 7).to(dtype)
    bias = random(37, seed=1) if has_bias else None
    x = random(rows, 48, seed=2)

    found = ops.linear(x, ops.pack_linear(weight.clone(), bias))

    assert found.is_contiguous()
    assert_near(found, ORACLE.linear(x, ORACLE.pack_linear(weight.float(), bias)))


@pytest.mark.parametrize("dtype", FORMATS)
def test_company_and_threads_change_no_bit(
    ops: CpuOperations, more_threads: CpuOperations, dtype: torch.dtype
) -> None:
    linear = ops.pack_linear(random(96, 160, dtype=dtype), None)
    x = random(300, 160, seed=1)
    first = ops.linear(x[:1], linear)

    for rows in (2, 5, 16, 17, 33, 64, 65, 130, 300):
        together = ops.linear(x[:rows], linear)
        assert together[:1].equal(first)
        assert together.equal(more_threads.linear(x[:rows], linear))
