"""From config.json to a model's shape, and what is refused before anything is loaded."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from tests.worker.tiny_models import MODELS, ROPES, save_model
from worker.errors import ModelError, UnsupportedModel
from worker.models.spec import ModelSpec, read_spec

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}


def spec_of(folder: Path, **changes: object) -> ModelSpec:
    """The spec of SmolLM2's config with changes; `...` takes a field out."""
    config = {key: value for key, value in {**SMOLLM2, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return read_spec(folder)


def test_a_config_in_the_old_style_is_understood(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, rope_scaling=None, torch_dtype="bfloat16")

    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (9, 3, 64)
    assert (spec.rope.kind, spec.rope.theta) == ("default", 100000.0)
    assert spec.ties_embeddings
    assert (spec.has_qkv_bias, spec.has_o_bias, spec.has_mlp_bias) == (False, False, False)
    assert not spec.has_head_norms
    assert spec.windows == (0, 0, 0, 0)
    assert spec.dtype == "bfloat16"


@pytest.mark.parametrize("kind", ROPES)
def test_both_styles_of_rope_settings_mean_the_same(kind: str, tmp_path: Path) -> None:
    words = ROPES[kind]
    scaling = {name: value for name, value in words.items() if name != "rope_theta"}
    older = {"type" if name == "rope_type" else name: value for name, value in scaling.items()}
    common = {"head_dim": 16, "max_position_embeddings": 256}

    new = spec_of(tmp_path, rope_theta=..., rope_parameters=words, **common)
    old = spec_of(tmp_path, rope_theta=words["rope_theta"], rope_scaling=scaling, **common)
    oldest = spec_of(tmp_path, rope_theta=words["rope_theta"], rope_scaling=older, **common)

    assert new.rope == old.rope == oldest.rope
    assert new.rope.theta == 5000.0


@pytest.mark.parametrize("name", MODELS)
def test_numbers_are_those_that_transformers_reads(name: str, tmp_path: Path) -> None:
    _, folder = save_model(name, tmp_path)

    spec, config = read_spec(folder), AutoConfig.from_pretrained(folder)

    assert spec.vocab_size == config.vocab_size
    assert spec.mlp_columns == config.intermediate_size
    assert spec.num_kv_heads == config.num_key_value_heads
    assert spec.head_dim == config.head_dim
    assert spec.max_position_embeddings == config.max_position_embeddings
    assert spec.rms_norm_eps == config.rms_norm_eps
    assert spec.rope.theta == config.rope_parameters["rope_theta"]
    assert spec.ties_embeddings == config.tie_word_embeddings


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("MistralForCausalLM", {}, (4096,) * 4),
        ("MistralForCausalLM", {"sliding_window": None}, (0,) * 4),
        ("MistralForCausalLM", {"sliding_window": 7}, (7,) * 4),
        ("Qwen2ForCausalLM", {"sliding_window": 7}, (0,) * 4),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3},
            (0, 0, 0, 7),
        ),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
            (7,) * 4,
        ),
        (
            "Qwen3ForCausalLM",
            {
                "use_sliding_window": True,
                "sliding_window": 7,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            (0, 7, 0, 7),
        ),
        ("LlamaForCausalLM", {"sliding_window": 7}, (0,) * 4),
    ],
)
def test_each_layer_knows_its_window(
    architecture: str, changes: dict[str, object], windows: tuple[int, ...], tmp_path: Path
) -> None:
    assert spec_of(tmp_path, architectures=[architecture], **changes).windows == windows


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 8192),
        ({"rope_type": "linear", "factor": 2.0}, 16384),
        ({"rope_type": "dynamic", "factor": 2.5}, 20480),
        ({"rope_type": "yarn", "factor": 4.0}, 32768),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
            8192,
        ),
    ],
)
def test_a_stretch_of_the_angles_extends_the_context(
    scaling: object, length: int, tmp_path: Path
) -> None:
    assert spec_of(tmp_path, rope_scaling=scaling).max_context_len == length


def test_biases_follow_the_architecture(tmp_path: Path) -> None:
    qwen2 = spec_of(tmp_path, architectures=["Qwen2ForCausalLM"])
    assert (qwen2.has_qkv_bias, qwen2.has_o_bias) == (True, False)
    llama = spec_of(tmp_path, attention_bias=True, mlp_bias=True)
    assert (llama.has_qkv_bias, llama.has_o_bias, llama.has_mlp_bias) == (True, True, True)
    mistral = spec_of(tmp_path, architectures=["MistralForCausalLM"], attention_bias=True)
    assert (mistral.has_qkv_bias, mistral.has_o_bias) == (False, False)
    qwen3 = spec_of(tmp_path, architectures=["Qwen3ForCausalLM"])
    assert qwen3.has_head_norms
    assert qwen3.head_dim == 128


def test_another_architecture_is_refused_with_the_list_of_those_supported(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        spec_of(tmp_path, architectures=["GPT2LMHeadModel"])

    assert str(refusal.value) == (
        "architecture GPT2LMHeadModel is not supported; supported are LlamaForCausalLM, "
        "MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"type": "proportional"}}, "rope type 'proportional'"),
        ({"partial_rotary_factor": 0.5, "rope_scaling": {"type": "default"}}, "partial_rotary"),
    ],
)
def test_a_setting_that_would_change_the_result_is_refused(
    changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        spec_of(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": "wide"}, "hidden_size must be a whole number of at least 1, got 'wide'"),
        ({"num_hidden_layers": ...}, "num_hidden_layers must be .* got nothing"),
        ({"vocab_size": 0}, "vocab_size must be .* got 0"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a number above 0, got -1"),
        ({"num_key_value_heads": 4}, r"a divisor of num_attention_heads \(9\), got 4"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"torch_dtype": "int8"}, "dtype must be float32, bfloat16 or float16, got 'int8'"),
        ({"architectures": "Llama"}, "architectures must be a list of texts"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor must be a number"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0]}},
            "rope_scaling.short_factor must be a list of 32 numbers",
        ),
    ],
)
def test_a_wrong_field_is_named_with_what_it_must_be(
    changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=words):
        spec_of(tmp_path, **changes)


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        read_spec(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe"])
def test_a_config_that_is_no_json_object_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)

    with pytest.raises(ModelError, match=r"config\.json"):
        read_spec(tmp_path)
