"""Reading slices of safetensors files, whole and damaged."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.worker.groups import WorkerGroup
from tests.worker.tiny_models import save_model
from worker.errors import DamagedCheckpoint, UnsupportedModel
from worker.shards import Span
from worker.weights import INDEX_FILE, SINGLE_FILE, Checkpoint

WEIGHT = torch.arange(24, dtype=torch.float32).reshape(6, 4)


def save(folder: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors, folder / SINGLE_FILE)
    return folder


def test_a_span_of_rows_or_columns_is_read_alone(tmp_path: Path) -> None:
    with Checkpoint(save(tmp_path, weight=WEIGHT), torch.float32) as checkpoint:
        rows = checkpoint.read("weight", (6, 4), rows=Span(1, 3))
        columns = checkpoint.read("weight", (6, 4), columns=Span(2, 4))

    assert rows.equal(WEIGHT[1:3])
    assert columns.equal(WEIGHT[:, 2:])


def test_tensors_outlive_their_files(tmp_path: Path) -> None:
    with Checkpoint(save(tmp_path, weight=WEIGHT), torch.float32) as checkpoint:
        whole = checkpoint.read("weight", (6, 4))
    (tmp_path / SINGLE_FILE).write_bytes(b"")

    assert whole.equal(WEIGHT)


def test_what_is_lent_lies_in_the_file_until_it_is_converted(tmp_path: Path) -> None:
    with Checkpoint(save(tmp_path, weight=WEIGHT), torch.float32) as checkpoint:
        lent = checkpoint.lend("weight", (6, 4), columns=Span(2, 4))
        assert lent.equal(WEIGHT[:, 2:])
        assert checkpoint.lends(lent)
        assert not checkpoint.lends(lent.clone())
        assert not checkpoint.lends(lent.to(torch.bfloat16))
        checkpoint.take_back()
        assert not checkpoint.lends(lent)


def test_pages_of_a_file_are_given_up_with_what_was_lent(tmp_path: Path) -> None:
    large = torch.ones(4096, 4096)  # 64 MiB
    with Checkpoint(save(tmp_path, weight=large), torch.float32) as checkpoint:
        before = mapped_file_bytes()
        checkpoint.lend("weight", (4096, 4096)).sum()
        held = mapped_file_bytes()
        checkpoint.take_back()
        after = mapped_file_bytes()

    assert held - before > large.nbytes * 0.9
    assert after - before < large.nbytes * 0.1


def mapped_file_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssFile:")[2].split()[0]) * 1024


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.float16, torch.bfloat16, torch.float32])
def test_tensors_are_converted_as_they_are_read(
    stored: torch.dtype, wanted: torch.dtype, tmp_path: Path
) -> None:
    with Checkpoint(save(tmp_path, weight=WEIGHT.to(stored)), wanted) as checkpoint:
        read = checkpoint.read("weight", (6, 4))

    assert read.dtype == wanted
    assert read.float().equal(WEIGHT)


def test_a_sharded_checkpoint_is_one(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({name: WEIGHT}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))

    with Checkpoint(tmp_path, torch.float32) as checkpoint:
        assert set(checkpoint) == {"a", "b"}
        assert checkpoint.read("b", (6, 4)).equal(WEIGHT)


def test_a_missing_tensor_is_named_with_its_shape(tmp_path: Path) -> None:
    with (
        Checkpoint(save(tmp_path, weight=WEIGHT), torch.float32) as checkpoint,
        pytest.raises(DamagedCheckpoint, match=r"'bias': missing .* wanted shape \[6\]"),
    ):
        checkpoint.read("bias", (6,))


def test_a_wrong_shape_is_named_with_both(tmp_path: Path) -> None:
    with (
        Checkpoint(save(tmp_path, weight=WEIGHT), torch.float32) as checkpoint,
        pytest.raises(
            DamagedCheckpoint,
            match=r"model\.safetensors: tensor 'weight': wanted shape \[6, 5\], got \[6, 4\]",
        ),
    ):
        checkpoint.read("weight", (6, 5))


def test_a_type_without_fractions_is_refused(tmp_path: Path) -> None:
    with (
        Checkpoint(save(tmp_path, weight=WEIGHT.int()), torch.float32) as checkpoint,
        pytest.raises(DamagedCheckpoint, match="wanted one of the types F32, BF16, F16, got I32"),
    ):
        checkpoint.read("weight", (6, 4))


@pytest.mark.parametrize("kept", [0, 4, 40, -1])
def test_a_truncated_file_is_refused_by_name(kept: int, tmp_path: Path) -> None:
    file = save(tmp_path, weight=WEIGHT) / SINGLE_FILE
    file.write_bytes(file.read_bytes()[:kept])

    with pytest.raises(DamagedCheckpoint, match=r"model\.safetensors: not a whole safetensors"):
        Checkpoint(tmp_path, torch.float32)


def test_a_file_of_garbage_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(b"\x80\x04garbage" * 100)

    with pytest.raises(DamagedCheckpoint, match="not a whole safetensors file"):
        Checkpoint(tmp_path, torch.float32)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "part-1.safetensors"}}))

    with pytest.raises(DamagedCheckpoint, match=r"part-1\.safetensors: missing"):
        Checkpoint(tmp_path, torch.float32)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 5}'])
def test_a_damaged_index_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text(content)

    with pytest.raises(DamagedCheckpoint, match=r"index\.json: wanted a JSON object"):
        Checkpoint(tmp_path, torch.float32)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", 7])
def test_an_index_cannot_point_outside_its_folder(name: object, tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": name}}))

    with pytest.raises(DamagedCheckpoint, match="wanted plain file names"):
        Checkpoint(tmp_path, torch.float32)


def test_a_folder_without_weights_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()

    with pytest.raises(DamagedCheckpoint, match=r"no safetensors .* only pytorch_model\.bin"):
        Checkpoint(tmp_path, torch.float32)


def test_a_sharded_model_of_several_files_loads_like_one_of_a_single_file(tmp_path: Path) -> None:
    model, single = save_model("qwen2", tmp_path / "single")
    model.save_pretrained(tmp_path / "several", max_shard_size="20KB")
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 3

    sizes = []
    for folder in (single, tmp_path / "several"):
        with WorkerGroup(folder) as group:
            sizes.append(group.start().weight_bytes)

    assert sizes[0] == sizes[1]


def test_ranks_share_the_weights_among_them(tmp_path: Path) -> None:
    _, folder = save_model("llama", tmp_path)
    with WorkerGroup(folder, ops="reference") as whole:
        total = whole.start().weight_bytes
    with WorkerGroup(folder, tp=3, ops="reference") as group:
        share = group.start().weight_bytes

    assert share < total / 2


def test_an_unknown_architecture_is_refused_before_any_weight_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    (tmp_path / SINGLE_FILE).write_bytes(b"damaged as well")

    with pytest.raises(UnsupportedModel, match="MambaForCausalLM"):
        WorkerGroup(tmp_path)


@pytest.mark.parametrize(
    "lost", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"]
)
def test_a_model_that_lacks_a_tensor_does_not_load(lost: str, tmp_path: Path) -> None:
    model, folder = save_model("llama", tmp_path)
    state = {name: value for name, value in model.state_dict().items() if name != lost}
    save_file(state, folder / SINGLE_FILE)

    with (
        WorkerGroup(folder) as group,
        pytest.raises(DamagedCheckpoint, match=f"tensor '{lost}': missing"),
    ):
        group.start()
