"""Models that no worker could serve are refused before any worker starts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.model_check import check_model
from scheduler.errors import ConfigError
from tests.worker.tiny_models import save_model


def write_config(folder: Path, **fields: object) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "num_hidden_layers": 30,
    }
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_sizes_that_work_pass(tmp_path: Path, size: int) -> None:
    check_model(write_config(tmp_path), size)


def test_a_tensor_parallel_size_that_cannot_work_is_refused_with_those_that_do(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=4 .* one of 1, 2, 3, 9"):
        check_model(write_config(tmp_path), 4)


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    check_model(write_config(tmp_path), 1, 30)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=31 .* at most 30"):
        check_model(write_config(tmp_path), 1, 31)


def test_another_architecture_is_refused_with_the_list(tmp_path: Path) -> None:
    folder = write_config(tmp_path, architectures=["GPT2LMHeadModel"])

    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel is not supported; .*LlamaForCausalLM"):
        check_model(folder, 1)


def test_what_workers_would_refuse_after_loading_is_refused_at_once(tmp_path: Path) -> None:
    _, folder = save_model("llama", tmp_path)
    check_model(folder, 1, max_model_len=64)
    with pytest.raises(ConfigError, match=r"max_model_len=1000000 is above the \d+ tokens"):
        check_model(folder, 1, max_model_len=10**6)

    config = json.loads((folder / "config.json").read_text())
    write_config(folder, **config, quantization_config={"quant_method": "awq"})
    with pytest.raises(ConfigError, match="quantization_config is not supported; use"):
        check_model(folder, 1)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"architectures": 3}'])
def test_a_file_that_cannot_be_read_is_left_to_the_workers(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)

    check_model(tmp_path, 4)


def test_the_check_loads_no_torch() -> None:
    program = "import sys, cluster.model_check; assert 'torch' not in sys.modules"

    subprocess.run([sys.executable, "-c", program], check=True)
