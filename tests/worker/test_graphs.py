"""Decode graphs: which one a step takes, and that padding changes and writes nothing."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.worker.ops.batches import make_shape, make_step
from worker.graphs import LARGEST_GRAPH, CudaCapture, DecodeGraphs, graph_sizes
from worker.ops.reference import ReferenceOperations
from worker.ops.table import BatchInputs, Operations
from worker.window import NO_WINDOW

MAX_CONTEXT = 64
BLOCK_SIZE = 16
SHAPE = make_shape(4, 2, 64)


class FakeCapture:
    """Replays by calling again. `bytes_each` says what each recording seems to take."""

    def __init__(self, bytes_each: tuple[int, ...] = ()) -> None:
        self.num_recorded = 0
        self.replayed: list[int] = []
        self._bytes_each = bytes_each

    def record(self, launch: Callable[[], None]) -> Callable[[], None]:
        launch()
        number = self.num_recorded
        self.num_recorded += 1

        def replay() -> None:
            self.replayed.append(number)
            launch()

        return replay

    def used_bytes(self) -> int:
        return 1000 + sum(self._bytes_each[: self.num_recorded])


class Layer:
    """A forward pass of one attention layer, and what it was called with."""

    def __init__(self, kv: Tensor, ops: Operations | None = None) -> None:
        self.kv = kv
        self.ops = ops or ReferenceOperations()
        self.batches: list[BatchInputs] = []
        random = torch.Generator().manual_seed(7)
        table = torch.randn((100, SHAPE.qkv_width), generator=random)
        self._qkv = table.to(device=kv.device, dtype=kv.dtype)
        self._cos_sin = torch.rand((MAX_CONTEXT, SHAPE.head_dim), generator=random).to(kv.device)

    def __call__(self, batch: BatchInputs) -> Tensor:
        self.batches.append(batch)
        self.ops.begin_step(batch, SHAPE, BLOCK_SIZE)
        qkv = self._qkv[batch.token_ids]
        q = self.ops.rotate_and_store(qkv, self.kv, batch, SHAPE, self._cos_sin, None)
        return self.ops.paged_attention(q, self.kv, batch, SHAPE, NO_WINDOW)


def make_graphs(
    forward: Callable[[BatchInputs], Tensor],
    sizes: tuple[int, ...] = (1, 2, 4, 6),
    capture: FakeCapture | None = None,
) -> DecodeGraphs:
    return DecodeGraphs(
        forward,
        sizes=sizes,
        max_context_len=MAX_CONTEXT,
        max_blocks=MAX_CONTEXT // BLOCK_SIZE,
        device=torch.device("cpu"),
        capture=capture or FakeCapture(),
    )


def decodes(contexts: list[int], seed: int = 0) -> tuple[BatchInputs, Tensor]:
    step = make_step([(1, context) for context in contexts], SHAPE, seed=seed)
    # make_step adds columns that no context needs; the worker's tables have none.
    table = step.batch.block_tables[:, : -(-max(contexts) // BLOCK_SIZE)]
    return replace(step.batch, block_tables=table), step.kv


def test_graph_sizes_rise_to_the_number_of_sequences_and_no_further() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(2) == (1, 2)
    assert graph_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert graph_sizes(4096)[-1] == LARGEST_GRAPH
    for most in (3, 8, 9, 100, 256, 300, 512):
        sizes = graph_sizes(most)
        assert list(sizes) == sorted(set(sizes))
        assert sizes[-1] == most
        assert all(b - a <= 16 for a, b in pairwise(sizes))


@pytest.mark.parametrize(("num_slices", "graph"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 6), (6, 6)])
def test_a_step_takes_the_least_graph_that_holds_it(num_slices: int, graph: int) -> None:
    batch, kv = decodes([9] * num_slices)
    graphs = make_graphs(Layer(kv))
    graphs.record()
    assert graphs.size_for(batch) == graph


def test_chunks_large_steps_and_unrecorded_sizes_run_without_a_graph() -> None:
    batch, kv = decodes([9, 9])
    graphs = make_graphs(Layer(kv))
    assert graphs.run(batch) is None, "nothing is recorded"
    graphs.record()
    assert graphs.run(batch) is not None
    assert graphs.run(replace(batch, max_slice_len=2)) is None
    assert graphs.run(decodes([9] * 7)[0]) is None


@pytest.mark.parametrize("contexts", [[33], [5, 64, 17], [1, 2, 3, 4, 5], [48] * 6])
def test_a_padded_step_gives_and_writes_what_the_bare_one_does(contexts: list[int]) -> None:
    batch, kv = decodes(contexts)
    bare = Layer(kv.clone())
    wanted = bare(batch)
    layer = Layer(kv.clone())
    graphs = make_graphs(layer)
    graphs.record()

    got = graphs.run(batch)

    assert got is not None
    assert torch.equal(got, wanted)
    assert torch.equal(layer.kv, bare.kv)


def test_recording_writes_nothing_to_the_pool() -> None:
    _, kv = decodes([20, 30])
    layer = Layer(kv.clone())
    make_graphs(layer).record()
    assert torch.equal(layer.kv, kv)


def test_a_smaller_step_after_a_larger_one_leaves_no_row_behind() -> None:
    large, kv = decodes([40, 50, 60, 20, 30])
    layer = Layer(kv.clone())
    graphs = make_graphs(layer)
    graphs.record()
    graphs.run(large)
    layer.kv.copy_(kv)

    small, _ = decodes([7, 8, 9])
    graphs.run(small)

    seen = layer.batches[-1]
    assert seen.num_slices == 4
    assert seen.cells[3] == -1
    assert seen.context_lens[3] == 0
    wanted = Layer(kv.clone())
    wanted(small)
    assert torch.equal(layer.kv, wanted.kv)


def test_every_replay_of_a_size_sees_the_same_tensors() -> None:
    batch, kv = decodes([9, 19, 29])
    layer = Layer(kv)
    graphs = make_graphs(layer, sizes=(4,))
    graphs.record()
    graphs.run(batch)
    graphs.run(decodes([3, 4])[0])

    assert len({id(seen) for seen in layer.batches}) == 1
    assert layer.batches[0].max_context_len == MAX_CONTEXT


def test_graphs_are_recorded_from_the_largest_and_share_one_output() -> None:
    large, kv = decodes([9, 9, 9])
    layer = Layer(kv)
    capture = FakeCapture()
    graphs = make_graphs(layer, capture=capture)
    graphs.record()
    assert [seen.num_slices for seen in layer.batches] == [6, 6, 4, 2, 1]

    first = graphs.run(decodes([9])[0])
    second = graphs.run(large)

    assert first is not None
    assert second is not None
    assert first.data_ptr() == second.data_ptr()
    assert capture.replayed == [3, 1]


def test_what_graphs_take_is_measured_and_estimated_by_the_two_largest() -> None:
    _, kv = decodes([9])
    recorded = make_graphs(Layer(kv), capture=FakeCapture((500, 20, 20, 20)))
    assert recorded.record() == recorded.buffer_bytes + 560
    estimated = make_graphs(Layer(kv), capture=FakeCapture((500, 20)))
    assert estimated.estimate() == estimated.buffer_bytes + 560
    assert estimated.run(decodes([9])[0]) is None, "an estimate leaves no graph"


def test_sizes_that_do_not_rise_are_refused() -> None:
    with pytest.raises(AssertionError, match="must rise"):
        make_graphs(lambda batch: batch.token_ids, sizes=(4, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replayed_graphs_give_the_bits_of_launched_kernels(dtype: torch.dtype) -> None:
    from worker.ops.cuda import CudaOperations

    device = torch.device("cuda")
    contexts = [5, 64, 17, 33, 48]
    step = make_step([(1, context) for context in contexts], SHAPE, dtype=dtype, device=device)
    batch = replace(step.batch, block_tables=step.batch.block_tables[:, :4].contiguous())
    layer = Layer(step.kv.clone(), CudaOperations())
    graphs = DecodeGraphs(
        layer,
        sizes=graph_sizes(16),
        max_context_len=MAX_CONTEXT,
        max_blocks=MAX_CONTEXT // BLOCK_SIZE,
        device=device,
        capture=CudaCapture(device),
    )
    assert graphs.record() > 0
    bare = Layer(step.kv.clone(), CudaOperations())
    wanted = bare(batch)

    for _ in range(3):
        got = graphs.run(batch)
        assert got is not None
        assert torch.equal(got, wanted)
        assert torch.equal(layer.kv, bare.kv)
