"""What a rank is expected to need, held against what ranks say that they have."""

from pathlib import Path

import pytest

from tests.worker.groups import WorkerGroup
from tests.worker.tiny_models import MODELS, save_model
from worker.budget import share_of_device, share_of_host
from worker.estimate import (
    Form,
    activation_bytes,
    kernel_level,
    largest_context,
    read_bytes,
    requests_at_once,
    weight_bytes,
)
from worker.models.spec import ModelSpec, model_stages, model_widths, read_spec
from worker.runner import ModelRunner
from worker.shards import deal_shards

LAYOUTS = [(tp, pp) for tp in (1, 2, 3) for pp in (1, 2)]
"""(tensor_parallel_size, pipeline_parallel_size)"""


def form_of(spec: ModelSpec, **changes: object) -> Form:
    fields: dict[str, object] = {
        "dtype": spec.dtype,
        "kv_dtype": spec.dtype,
        "ops": "cpu",
        "level": kernel_level(),
    }
    return Form(**{**fields, **changes})  # type: ignore[arg-type]  # a test's own words


def expected_weights(spec: ModelSpec, form: Form, tp: int, pp: int) -> list[int]:
    """Of each rank, stage after stage."""
    shards = deal_shards(model_widths(spec), tp)
    return [
        weight_bytes(spec, shard, stage, form, spec.max_context_len)
        for stage in model_stages(spec, pp)
        for shard in shards
    ]


def loaded_weights(model_dir: Path, tp: int, pp: int, **settings: object) -> list[int]:
    with WorkerGroup(model_dir, tp=tp, pp=pp, **settings) as group:
        group.load()
        return [num_bytes_of(runner) for runner in group.runners]


def num_bytes_of(runner: ModelRunner) -> int:
    assert runner._decoder is not None
    return runner._decoder.weights.num_bytes


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_foretold_to_the_byte(name: str, tmp_path: Path) -> None:
    _, folder = save_model(name, tmp_path)
    spec = read_spec(folder)

    assert loaded_weights(folder, 1, 1) == expected_weights(spec, form_of(spec), 1, 1)


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
@pytest.mark.parametrize("name", ["llama_tied", "qwen3"])
def test_weights_of_every_rank_are_foretold(name: str, tp: int, pp: int, tmp_path: Path) -> None:
    _, folder = save_model(name, tmp_path)
    spec = read_spec(folder)

    assert loaded_weights(folder, tp, pp) == expected_weights(spec, form_of(spec), tp, pp)


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({"dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        ({"quantization": "int8"}, {"is_int8": True}),
        ({"ops": "reference"}, {"ops": "reference"}),
        ({"ops": "reference", "dtype": "float16"}, {"ops": "reference", "dtype": "float16"}),
    ],
    ids=str,
)
def test_weights_are_foretold_in_every_form(
    settings: dict[str, object], changes: dict[str, object], tmp_path: Path
) -> None:
    _, folder = save_model("qwen2", tmp_path)
    spec = read_spec(folder)

    assert loaded_weights(folder, 2, 1, **settings) == expected_weights(
        spec, form_of(spec, **changes), 2, 1
    )


@pytest.mark.parametrize(("quantization", "is_int8"), [("none", False), ("int8", True)])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
def test_a_steps_buffers_are_foretold_to_the_byte(
    tp: int, pp: int, quantization: str, is_int8: bool, tmp_path: Path
) -> None:
    _, folder = save_model("llama", tmp_path)
    spec = read_spec(folder)
    form = form_of(spec, is_int8=is_int8)
    max_tokens, max_seqs = 96, 96  # so that every row is one that is sampled

    with WorkerGroup(
        folder,
        tp=tp,
        pp=pp,
        quantization=quantization,
        max_num_batched_tokens=max_tokens,
        max_num_seqs=max_seqs,
    ) as group:
        group.start()
        found = [buffer_bytes_of(runner) for runner in group.runners]

    shards = deal_shards(model_widths(spec), tp)
    expected = [
        activation_bytes(spec, shard, stage, form, max_tokens=max_tokens, max_seqs=max_seqs)
        - (logits_bytes(spec, shard.vocab_rows.size, shard.rank, tp) if stage.is_last else 0)
        for stage in model_stages(spec, pp)
        for shard in shards
    ]
    assert found == expected


def buffer_bytes_of(runner: ModelRunner) -> int:
    """Of the recorded forward pass, and of what comes from the stage before."""
    assert runner._program is not None
    buffers = sum(one.nbytes for one in runner._program._recording.buffers.values())
    return buffers + (0 if runner._incoming is None else runner._incoming.nbytes)


def logits_bytes(spec: ModelSpec, rows: int, rank: int, size: int) -> int:
    """Of 32 sequences: this rank's, and on the rank that samples everybody's."""
    return 32 * 4 * (rows + (spec.vocab_size if size > 1 and rank == 0 else 0))


def test_every_step_reads_all_but_the_tables_that_are_looked_up(tmp_path: Path) -> None:
    _, folder = save_model("llama", tmp_path)
    spec = read_spec(folder)
    (shard,), (stage,) = deal_shards(model_widths(spec), 1), model_stages(spec, 1)
    form = form_of(spec, ops="cuda", device="cuda", dtype="bfloat16")

    read = read_bytes(spec, shard, stage, form)
    held = weight_bytes(spec, shard, stage, form, max_model_len=100)

    assert held - read == spec.vocab_size * spec.hidden_size * 2 + 100 * spec.head_dim * 4


def test_a_pool_holds_requests_by_whole_blocks_and_no_more_than_there_are_slots() -> None:
    assert requests_at_once(100, 16, 33, 256) == 33  # three blocks each
    assert requests_at_once(100, 16, 33, 8) == 8
    assert largest_context(10, 16, 4096) == 160
    assert largest_context(1000, 16, 4096) == 4096


def test_cpu_ranks_share_what_is_free_and_gpu_ranks_take_it_all() -> None:
    host = share_of_host(free_bytes=1000, activation_bytes=50, utilization=0.8, ranks_on_host=2)
    device = share_of_device(total_bytes=1000, free_bytes=700, activation_bytes=50, utilization=0.8)

    assert host.budget_bytes == 350
    assert device.budget_bytes == 450
