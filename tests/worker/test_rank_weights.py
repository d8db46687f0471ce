"""Ranks that map the weights of ranks before them: the same bits, nothing read."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.worker.groups import WorkerGroup
from tests.worker.kept import OneKeeper
from tests.worker.plans import PlanDriver
from tests.worker.tiny_models import MODELS, save_model
from worker.errors import UnfitWeights
from worker.models.decoder import DecoderWeights
from worker.models.weight_form import weights_in
from worker.weight_memory import map_sealed


@pytest.fixture
def keeper() -> Iterator[OneKeeper]:
    keeper = OneKeeper()
    yield keeper
    keeper.forget()


def load(folder: Path, keeper: OneKeeper | None, **settings: object) -> WorkerGroup:
    group = WorkerGroup(folder, keepers=[keeper], **settings)  # type: ignore[arg-type]  # a test's
    group.load()
    return group


def weights_of(group: WorkerGroup, rank: int = 0) -> DecoderWeights:
    decoder = group.runners[rank]._decoder
    assert decoder is not None
    return decoder.weights


def tensors_of(weights: object) -> list[torch.Tensor]:
    if isinstance(weights, torch.Tensor):
        return [weights]
    if isinstance(weights, tuple):
        return [tensor for one in weights for tensor in tensors_of(one)]
    fields = getattr(weights, "__dataclass_fields__", ())
    return [tensor for name in fields for tensor in tensors_of(getattr(weights, name))]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}, {"dtype": "bfloat16"}], ids=str)
def test_mapped_weights_are_the_same_bits_as_read_ones(
    name: str, settings: dict[str, object], keeper: OneKeeper, tmp_path: Path
) -> None:
    _, folder = save_model(name, tmp_path)
    with (
        load(folder, None, **settings) as cold,
        load(folder, keeper, **settings) as first,
        load(folder, keeper, **settings) as second,
    ):
        read, filled, mapped = (weights_of(group) for group in (cold, first, second))

        assert keeper.lent == ["stage 0 of 1, rank 0 of 1"]
        assert read.num_bytes == filled.num_bytes == mapped.num_bytes
        pairs = zip(tensors_of(read), tensors_of(filled), tensors_of(mapped), strict=True)
        for one, two, three in pairs:
            assert one.dtype == two.dtype == three.dtype
            assert torch.equal(one, two)
            assert torch.equal(one, three)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_every_rank_has_a_copy_of_its_own_part(tp: int, pp: int, tmp_path: Path) -> None:
    _, folder = save_model("llama_tied", tmp_path)
    keepers = [OneKeeper() for _ in range(tp * pp)]
    outputs = []
    for _ in range(2):
        with WorkerGroup(folder, tp=tp, pp=pp, keepers=keepers) as group:
            driver = PlanDriver(
                block_size=16,
                num_blocks=group.start().num_blocks,
                num_slots=8,
                gives_all=pp > 1,
            )
            sequence = driver.admit(list(range(1, 20)))
            for _ in range(6):
                plan = driver.plan([(sequence, len(sequence.tokens) - sequence.computed)])
                driver.take([(sequence, 1)], plan, group.execute(plan))
            outputs.append(sequence.output)

    assert outputs[0] == outputs[1]
    assert len({part for each in keepers for part in each.lent}) == tp * pp
    assert all(len(each.lent) == 1 for each in keepers)
    for each in keepers:
        each.forget()


def test_another_form_of_the_same_model_is_another_copy(keeper: OneKeeper, tmp_path: Path) -> None:
    _, folder = save_model("llama", tmp_path)
    for settings in ({}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"max_model_len": 64}):
        with load(folder, keeper, **settings):
            pass

    assert len(keeper.fds) == 4


def test_what_is_mapped_counts_as_shared(keeper: OneKeeper, tmp_path: Path) -> None:
    _, folder = save_model("llama", tmp_path)
    with load(folder, None) as alone, load(folder, keeper) as first, load(folder, keeper) as second:
        shared = [group.measure()[0].shared_bytes for group in (alone, first, second)]
        held = weights_of(first).num_bytes

    assert shared == [0, held, held]


def test_the_reference_operations_keep_nothing(keeper: OneKeeper, tmp_path: Path) -> None:
    _, folder = save_model("llama", tmp_path)
    with load(folder, keeper, ops="reference"):
        assert not keeper.fds


def test_a_copy_that_cannot_be_read_is_passed_over(keeper: OneKeeper, tmp_path: Path) -> None:
    _, folder = save_model("llama", tmp_path)
    with load(folder, keeper) as group:
        (fd,) = keeper.fds.values()
        memory, form = map_sealed(fd)
        far = form.replace(b'"start":0,', b'"start":99999999999,', 1)
        with pytest.raises(UnfitWeights, match="cannot be read"):
            weights_in(memory, far)
        assert torch.equal(weights_of(group).cos_sin, weights_in(memory, form).cos_sin)


def test_a_runner_that_ends_closes_its_link_to_the_keeper(
    keeper: OneKeeper, tmp_path: Path
) -> None:
    _, folder = save_model("llama", tmp_path)
    with load(folder, keeper):
        assert not keeper.is_closed
    assert keeper.is_closed
