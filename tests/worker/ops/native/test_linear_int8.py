"""Linear layers over int8 weights, against the same quantized numbers multiplied in float64."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.worker.ops.native.random_tensors import random
from worker.ops.cpu import CpuOperations
from worker.ops.table import Linear

GROUP = 32


def pack(ops: CpuOperations, weight: Tensor, bias: Tensor | None = None) -> Linear:
    packed = ops.team.pack(weight, torch.int8)
    return Linear(packed, bias, weight.shape[0], weight.shape[1], torch.int8, is_packed=True)


def kept_weight(ops: CpuOperations, linear: Linear) -> Tensor:
    """[out_features, in_features]: what the int8 values and their scales stand for."""
    return ops.embedding(torch.arange(linear.out_features), linear, 0)


def in_groups(x: Tensor) -> Tensor:
    """[rows, groups, GROUP], zeros past the last feature."""
    padding = -x.shape[1] % GROUP
    return torch.nn.functional.pad(x, (0, padding)).unflatten(1, (-1, GROUP))


def quantized_rows(ops: CpuOperations, x: Tensor) -> Tensor:
    """What a level makes of activations: 16 bits where it multiplies those, else 8. float64."""
    is_wide, is_fused = ops.team.level == "avx2", ops.team.level != "portable"
    most = torch.tensor(32767.0 if is_wide else 127.0)
    groups = in_groups(x)
    largest = groups.abs().amax(dim=2, keepdim=True)
    inverse = torch.where(largest < 1e-30, 0.0, most / largest)
    products = groups.double() * inverse.double() if is_fused else groups * inverse
    scale = largest * (1 / most)
    kept = products.round().double() * torch.where(largest < 1e-30, 0.0, scale).double()
    return kept.flatten(1)[:, : x.shape[1]]


def assert_exact(ops: CpuOperations, x: Tensor, linear: Linear) -> None:
    """Beside the order of float32 additions over groups, nothing is lost."""
    found = ops.linear(x, linear)
    weight, kept = kept_weight(ops, linear).double(), quantized_rows(ops, x)
    expected = kept @ weight.T
    size = kept.abs() @ weight.abs().T
    if linear.bias is not None:
        expected, size = expected + linear.bias, size + linear.bias.abs()
    assert found.shape == expected.shape
    assert bool(((found - expected).abs() <= 1e-6 * size).all())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 7, 33, 129, 300])
def test_sums_of_a_group_are_exact(ops: CpuOperations, rows: int, has_bias: bool) -> None:
    linear = pack(ops, random(70, 96), random(70, seed=1) if has_bias else None)
    assert_exact(ops, random(rows, 96, seed=2), linear)


@pytest.mark.parametrize("seed", range(40))
def test_any_shape_will_do(ops: CpuOperations, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, width, in_features = (int(rng.integers(1, most)) for most in (80, 140, 260))
    weight = random(width, in_features, seed=seed) * float(10 ** rng.uniform(-6, 2))
    x = random(rows, in_features, seed=seed + 1) * float(10 ** rng.uniform(-6, 4))
    bias = random(width, seed=seed + 2) if rng.integers(2) else None
    assert_exact(ops, x, pack(ops, weight, bias))


def test_largest_values_overflow_nothing(ops: CpuOperations) -> None:
    signs = random(40, 64, seed=3).sign()
    assert_exact(ops, signs[:9] * 5, pack(ops, signs * 2))
    assert_exact(ops, torch.full((9, 64), -3.0), pack(ops, torch.full((40, 64), -7.0)))
    assert_exact(ops, torch.full((9, 64), 3.0), pack(ops, torch.full((40, 64), -7.0)))


def test_a_weight_is_off_by_half_a_step_of_its_group_at_most(ops: CpuOperations) -> None:
    weight = random(50, 300) * torch.logspace(-6, 3, 50)[:, None]
    kept = kept_weight(ops, pack(ops, weight))

    largest = in_groups(weight).abs().amax(dim=2, keepdim=True)
    step = largest / 127 * (1 + 2**-7)  # a scale is rounded up to bfloat16
    assert bool((in_groups(kept - weight).abs() <= step / 2 * 1.0001).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_any_type_of_checkpoint_is_quantized_from_its_own_values(
    ops: CpuOperations, dtype: torch.dtype
) -> None:
    weight = random(45, 75).to(dtype)
    assert pack(ops, weight).weight.equal(pack(ops, weight.float()).weight)


def test_an_outlier_costs_other_groups_nothing(ops: CpuOperations) -> None:
    weight, x = random(40, 96), random(5, 96, seed=1)
    x[:, 10] = 1e4
    weight[:, :GROUP] = 0
    linear = pack(ops, weight)
    without = x.clone()
    without[:, :GROUP] = 0
    assert ops.linear(x, linear).equal(ops.linear(without, linear))


def test_what_is_zero_stays_zero(ops: CpuOperations) -> None:
    weight, x = random(20, 70), random(6, 70, seed=1)
    assert not ops.linear(torch.zeros(6, 70), pack(ops, weight)).any()
    assert not ops.linear(x, pack(ops, torch.zeros(20, 70))).any()
    assert not ops.linear(x * 1e-38, pack(ops, weight)).any()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_row_breaks_itself_alone(ops: CpuOperations, poison: float) -> None:
    linear = pack(ops, random(40, 96))
    x = random(6, 96, seed=1)
    broken = x.clone()
    broken[2, 50] = poison

    found, expected = ops.linear(broken, linear), ops.linear(x, linear)

    assert found[2].isnan().all()
    assert found[[0, 1, 3, 4, 5]].equal(expected[[0, 1, 3, 4, 5]])


def test_a_broken_weight_shows_in_its_own_column(ops: CpuOperations) -> None:
    weight = random(40, 96)
    weight[7, 33] = float("inf")
    found = ops.linear(random(3, 96, seed=1), pack(ops, weight))
    assert found[:, 7].isnan().all()
    assert int(found.isnan().sum()) == 3


def test_company_and_threads_change_no_bit(ops: CpuOperations, more_threads: CpuOperations) -> None:
    weight, x = random(150, 170), random(300, 170, seed=1)
    linear = pack(ops, weight)
    assert pack(more_threads, weight).weight.equal(linear.weight)
    whole = ops.linear(x, linear)

    for rows in (1, 2, 3, 4, 5, 8, 11, 127, 128, 130, 299):
        assert ops.linear(x[:rows], linear).equal(whole[:rows])
        assert more_threads.linear(x[-rows:], linear).equal(whole[-rows:])


def test_quantization_alone_costs_less_than_a_hundredth(ops: CpuOperations) -> None:
    weight, x = random(200, 576), random(20, 576, seed=1)
    exact = x.double() @ weight.double().T
    error = ops.linear(x, pack(ops, weight)) - exact
    assert float(error.square().mean().sqrt() / exact.square().mean().sqrt()) < 0.01
