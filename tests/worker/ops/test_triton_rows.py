"""Norms, rotation, activation and embedding in Triton against the oracle."""

import random

import pytest
import torch
from torch import Tensor

from tests.worker.ops.batches import make_shape, make_step
from tests.worker.ops.interpreted import DEVICE
from worker.ops.cuda import CudaOperations
from worker.ops.reference import ReferenceOperations
from worker.ops.table import HeadNorms

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CUDA, REFERENCE = CudaOperations(), ReferenceOperations()
# Both compute in float32 and round once; a last bit may fall either way.
RELATIVE = {torch.float32: 4e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def rand(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random).to(device=DEVICE, dtype=dtype)


def assert_close(got: Tensor, wanted: Tensor) -> None:
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    tolerance = RELATIVE[got.dtype]
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance / 16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [576, 64, 100, 4096])
def test_rms_norm_matches_the_oracle(dtype: torch.dtype, hidden: int) -> None:
    x, weight = rand(5, hidden, dtype=dtype), rand(hidden, dtype=dtype, seed=1)
    before = x.clone()
    assert_close(CUDA.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_adds_to_the_stream_and_norms_what_it_keeps(dtype: torch.dtype) -> None:
    x, weight = rand(5, 576, dtype=dtype), rand(576, dtype=dtype, seed=1)
    residual = rand(5, 576, dtype=dtype, seed=2)
    stream = residual.clone()

    out = CUDA.add_rms_norm(x.clone(), stream, weight, 1e-5)

    assert_close(out, REFERENCE.add_rms_norm(x, residual, weight, 1e-5))
    assert torch.equal(stream, residual), "a sum of two is rounded once: the same bits"


def test_rows_with_a_stride_are_normed_like_dense_ones() -> None:
    wide, weight = rand(4, 200, dtype=torch.float32), rand(64, dtype=torch.float32)
    view = wide[:, 32:96]
    assert torch.equal(
        CUDA.rms_norm(view, weight, 1e-6), CUDA.rms_norm(view.contiguous(), weight, 1e-6)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1536, 512, 33])
def test_gated_activation_matches_the_oracle(dtype: torch.dtype, columns: int) -> None:
    gate_up = 4 * rand(3, 2 * columns, dtype=dtype)
    assert_close(CUDA.gated_activation(gate_up), REFERENCE.gated_activation(gate_up))


def test_a_gate_far_below_zero_shuts_without_a_nan() -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 3.0, 3.0]], device=DEVICE)
    assert CUDA.gated_activation(gate_up).tolist() == [[0.0, 600.0]]


def test_embedding_gives_zeros_for_the_other_shards_tokens() -> None:
    rows = rand(10, 48, dtype=torch.bfloat16)
    table = CUDA.pack_embedding(rows)
    token_ids = torch.tensor([19, 20, 29, 30, 0], device=DEVICE)
    got = CUDA.embedding(token_ids, table, 20)
    assert torch.equal(got, REFERENCE.embedding(token_ids, table, 20))
    assert torch.equal(got[1], rows[0])
    assert not got[[0, 3, 4]].any()


@pytest.mark.parametrize("seed", range(12))
def test_rotated_heads_and_stored_cells_match_the_oracle(seed: int) -> None:
    choose = random.Random(seed)
    dtype = choose.choice(DTYPES)
    heads = choose.choice(((9, 3), (1, 1), (7, 1), (4, 4)))
    shape = make_shape(*heads, choose.choice((64, 80, 96, 128, 256)))
    step = make_step(
        [(1, 20), (3, 7), (1, 0), (2, 2)],
        shape,
        block_size=choose.choice((8, 16, 32)),
        dtype=dtype,
        device=DEVICE,
        seed=seed,
    )
    batch = step.batch
    qkv = rand(batch.num_tokens, shape.qkv_width, dtype=dtype, seed=seed)
    angle = rand(32, shape.head_dim // 2, dtype=torch.float32, seed=seed)
    cos_sin = torch.cat((angle.cos(), angle.sin()), dim=1)
    norms = None
    if choose.random() < 0.5:
        weights = [rand(shape.head_dim, dtype=dtype, seed=seed + n) for n in (1, 2)]
        norms = HeadNorms(*weights, 1e-6)
    kv, wanted_kv = step.kv.clone(), step.kv.clone()

    q = CUDA.rotate_and_store(qkv.clone(), kv, batch, shape, cos_sin, norms)

    wanted = REFERENCE.rotate_and_store(qkv, wanted_kv, batch, shape, cos_sin, norms)
    # The oracle rounds between norm and rotation, we do not: one more rounding of numbers
    # below 8, so an absolute error where cosine and sine cancel.
    loose = 8 * RELATIVE[dtype] if norms else 0.0
    for got, right in ((q, wanted), (kv, wanted_kv)):
        torch.testing.assert_close(got, right, rtol=RELATIVE[dtype], atol=RELATIVE[dtype] + loose)
    cells = batch.cells[batch.cells >= 0]
    untouched = torch.ones(kv.shape[1] * kv.shape[2], dtype=torch.bool)
    untouched[cells] = False
    assert torch.equal(kv.flatten(1, 2)[:, untouched], step.kv.flatten(1, 2)[:, untouched])
    stored = qkv.view(batch.num_tokens, -1, shape.head_dim)[:, -shape.num_kv_heads :]
    assert torch.equal(kv.flatten(1, 2)[1, cells], stored[batch.cells >= 0]), "V is copied"


def test_a_linear_layer_is_torchs() -> None:
    weight, bias = rand(24, 16, dtype=torch.float32), rand(24, dtype=torch.float32, seed=1)
    x = rand(3, 16, dtype=torch.float32, seed=2)
    packed = CUDA.pack_linear(weight, bias)
    assert packed.out_features == 24
    torch.testing.assert_close(CUDA.linear(x, packed), x @ weight.T + bias)


def test_a_step_without_tokens_launches_nothing() -> None:
    empty = torch.empty(0, 64, device=DEVICE)
    assert CUDA.rms_norm(empty, torch.ones(64, device=DEVICE), 1e-6).shape == (0, 64)
