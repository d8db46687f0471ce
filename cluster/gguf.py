"""GGUF files turned into Hugging Face checkpoints, with every weight in float32.

The result is what `transformers` and our own workers load: config.json, generation_config.json,
model.safetensors and the tokenizer's files. Tensors are de-quantized one at a time, so the memory
needed is that of the largest tensor, whatever the size of the model.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cluster.errors import ModelError
from cluster.gguf_file import GGUFFile
from cluster.gguf_tokenizer import Vocabulary, read_vocabulary, write_json, write_tokenizer


@dataclass(frozen=True, slots=True)
class Family:
    """What differs between the families that share Llama's shape."""

    model_type: str
    class_name: str
    is_interleaved: bool = False
    """llama.cpp stores q and k with the two halves of each head interleaved."""
    has_qkv_bias: bool = False
    has_qk_norm: bool = False


FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM", is_interleaved=True),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", has_qkv_bias=True),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", has_qk_norm=True),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that decide which tensors there are and how large they are."""

    num_layers: int
    hidden_size: int
    mlp_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Target:
    """Where one tensor of the file goes."""

    name: str
    shape: tuple[int, ...]
    interleaved_heads: int = 0
    """Heads whose rows must be put back in order; 0 where they are in order already."""


def convert(gguf_path: Path, folder: Path) -> None:
    """Write the checkpoint of `gguf_path` into the existing, empty `folder`.

    Raises:
        ModelError: the file is damaged, of an architecture, tokenizer or storage type that is not
            known here, or its tensors are not those of its architecture.
    """
    file = GGUFFile(gguf_path)
    if file.architecture not in FAMILIES:
        raise ModelError(
            f"{gguf_path} holds a model of architecture {file.architecture!r}; "
            f"these can be converted: {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[file.architecture]
    vocabulary = read_vocabulary(file)
    shape = read_shape(file)
    targets = plan_tensors(file, family, shape)
    write_json(folder / "config.json", build_config(file, family, shape, vocabulary))
    write_json(folder / "generation_config.json", build_generation_config(file, vocabulary))
    write_tokenizer(file, vocabulary, folder)
    write_weights(file, targets, folder / "model.safetensors")


def read_shape(file: GGUFFile) -> Shape:
    arch = file.architecture
    if file.find(f"{arch}.expert_count", int):
        raise ModelError(f"{file.path} is a mixture of experts; only dense models can be converted")
    if "token_embd.weight" not in file.tensor_names:
        raise ModelError(f"{file.path} has no tensor 'token_embd.weight'")
    hidden_size = file.require(f"{arch}.embedding_length", int)
    num_heads = file.require(f"{arch}.attention.head_count", int)
    num_kv_heads = file.find(f"{arch}.attention.head_count_kv", int) or num_heads
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ModelError(
            f"{file.path}: {num_heads} query heads cannot share {num_kv_heads} K/V heads evenly"
        )
    head_dim = file.find(f"{arch}.attention.key_length", int) or hidden_size // num_heads
    for key in (f"{arch}.attention.value_length", f"{arch}.rope.dimension_count"):
        if (size := file.find(key, int)) is not None and size != head_dim:
            raise ModelError(
                f"{file.path}: {key} is {size} but heads have {head_dim} dimensions; "
                "only models where both are equal can be converted"
            )
    num_layers = file.require(f"{arch}.block_count", int)
    if not 0 < num_layers <= len(file.tensor_names):
        raise ModelError(
            f"{file.path} says it has {num_layers} layers, but holds "
            f"{len(file.tensor_names)} tensors"
        )
    return Shape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        mlp_size=file.require(f"{arch}.feed_forward_length", int),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=file.shape("token_embd.weight")[0],
    )


def plan_tensors(file: GGUFFile, family: Family, shape: Shape) -> dict[str, Target]:
    """Each tensor of the file and where it goes, checked to be complete and of the right sizes.

    Raises:
        ModelError: tensors are missing, unknown, or of another size than the metadata says.
    """
    hidden = shape.hidden_size
    targets = {
        "token_embd.weight": Target("model.embed_tokens.weight", (shape.vocab_size, hidden)),
        "output_norm.weight": Target("model.norm.weight", (hidden,)),
    }
    if "output.weight" in file.tensor_names:
        targets["output.weight"] = Target("lm_head.weight", (shape.vocab_size, hidden))
    for layer in range(shape.num_layers):
        for name, target in _layer_tensors(file, family, shape).items():
            targets[f"blk.{layer}.{name}"] = Target(
                f"model.layers.{layer}.{target.name}", target.shape, target.interleaved_heads
            )
    unknown = file.tensor_names - targets.keys() - {"rope_freqs.weight"}
    missing = targets.keys() - file.tensor_names
    for fault, names in (("lacks", missing), ("has unknown", unknown)):
        if names:
            raise ModelError(
                f"{file.path} {fault} {len(names)} tensors for architecture "
                f"{file.architecture!r}, such as {', '.join(sorted(names)[:3])}"
            )
    for name, target in targets.items():
        if file.shape(name) != target.shape:
            raise ModelError(
                f"{file.path}: tensor {name!r} has shape {file.shape(name)}, but the metadata "
                f"ask for {target.shape}"
            )
    return targets


def _layer_tensors(file: GGUFFile, family: Family, shape: Shape) -> dict[str, Target]:
    hidden, mlp = shape.hidden_size, shape.mlp_size
    q_rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    q_heads = shape.num_heads if family.is_interleaved else 0
    kv_heads = shape.num_kv_heads if family.is_interleaved else 0
    targets = {
        "attn_norm.weight": Target("input_layernorm.weight", (hidden,)),
        "attn_q.weight": Target("self_attn.q_proj.weight", (q_rows, hidden), q_heads),
        "attn_k.weight": Target("self_attn.k_proj.weight", (kv_rows, hidden), kv_heads),
        "attn_v.weight": Target("self_attn.v_proj.weight", (kv_rows, hidden)),
        "attn_output.weight": Target("self_attn.o_proj.weight", (hidden, q_rows)),
        "ffn_norm.weight": Target("post_attention_layernorm.weight", (hidden,)),
        "ffn_gate.weight": Target("mlp.gate_proj.weight", (mlp, hidden)),
        "ffn_up.weight": Target("mlp.up_proj.weight", (mlp, hidden)),
        "ffn_down.weight": Target("mlp.down_proj.weight", (hidden, mlp)),
    }
    if family.has_qkv_bias or _has_attention_bias(file):
        targets["attn_q.bias"] = Target("self_attn.q_proj.bias", (q_rows,), q_heads)
        targets["attn_k.bias"] = Target("self_attn.k_proj.bias", (kv_rows,), kv_heads)
        targets["attn_v.bias"] = Target("self_attn.v_proj.bias", (kv_rows,))
    if _has_attention_bias(file):
        targets["attn_output.bias"] = Target("self_attn.o_proj.bias", (hidden,))
    if family.has_qk_norm:
        targets["attn_q_norm.weight"] = Target("self_attn.q_norm.weight", (shape.head_dim,))
        targets["attn_k_norm.weight"] = Target("self_attn.k_norm.weight", (shape.head_dim,))
    return targets


def _has_attention_bias(file: GGUFFile) -> bool:
    """Whether all four attention projections have a bias (`attention_bias` of Llama and Qwen3)."""
    return file.architecture != "qwen2" and "blk.0.attn_output.bias" in file.tensor_names


def build_config(
    file: GGUFFile, family: Family, shape: Shape, vocabulary: Vocabulary
) -> dict[str, object]:
    arch = file.architecture
    config: dict[str, object] = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "torch_dtype": "float32",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.mlp_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.require(f"{arch}.context_length", int),
        "rms_norm_eps": _shortest(file.require(f"{arch}.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _shortest(file.find(f"{arch}.rope.freq_base", float) or 10000.0),
        "rope_scaling": read_rope_scaling(file, shape.head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensor_names,
        "attention_bias": family.has_qkv_bias or _has_attention_bias(file),
        "mlp_bias": False,
        **_end_ids(vocabulary),
    }
    window = file.find(f"{arch}.attention.sliding_window", int)
    if window and arch == "llama":
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
        config["sliding_window"] = window
    return config


def build_generation_config(file: GGUFFile, vocabulary: Vocabulary) -> dict[str, object]:
    """Special ids, and the sampling that the model's makers recommend where the file says so."""
    recommended: dict[str, object | None] = {
        "temperature": file.find("general.sampling.temp", float),
        "top_k": file.find("general.sampling.top_k", int),
        "top_p": file.find("general.sampling.top_p", float),
        "min_p": file.find("general.sampling.min_p", float),
        "repetition_penalty": file.find("general.sampling.penalty_repeat", float),
    }
    given = {
        name: _shortest(value) if isinstance(value, float) else value
        for name, value in recommended.items()
        if value is not None
    }
    return {**_end_ids(vocabulary), **({"do_sample": True, **given} if given else {})}


def _end_ids(vocabulary: Vocabulary) -> dict[str, object]:
    ends = list(vocabulary.eos_ids)
    ids = {
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": vocabulary.pad_id,
    }
    return {role: value for role, value in ids.items() if value is not None}


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: GGUF holds 1e-5 as 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def read_rope_scaling(file: GGUFFile, head_dim: int) -> dict[str, object] | None:
    """How positions are stretched beyond the trained context, as config.json says it.

    Raises:
        ModelError: a kind of scaling that is not known here.
    """
    prefix = f"{file.architecture}.rope.scaling"
    if "rope_freqs.weight" in file.tensor_names:
        return _llama3_scaling(file, head_dim)
    kind = file.find(f"{prefix}.type", str) or "none"
    factor = file.find(f"{prefix}.factor", float)
    if kind == "none" or factor is None:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": _shortest(factor)}
    if kind == "yarn":
        trained = file.require(f"{prefix}.original_context_length", int)
        return {
            "rope_type": "yarn",
            "factor": _shortest(factor),
            "original_max_position_embeddings": trained,
        }
    raise ModelError(
        f"{file.path} scales rotary positions by {kind!r}; these are known: linear, llama3, yarn"
    )


def _llama3_scaling(file: GGUFFile, head_dim: int) -> dict[str, object]:
    """Recover Llama 3's parameters from the factors per frequency, all that a GGUF file keeps.

    Every published Llama 3 was trained on 8192 positions with low and high factors 1 and 4; the
    file's factors are compared with the ones that these give, and refused where they differ.
    """
    low, high, trained = 1.0, 4.0, 8192
    factors = file.weights("rope_freqs.weight")
    factor = _shortest(float(factors.max()))
    theta = file.find(f"{file.architecture}.rope.freq_base", float) or 10000.0
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (trained / wavelengths - low) / (high - low)
    with np.errstate(all="ignore"):  # senseless factors give senseless numbers, which differ
        between = 1 / ((1 - smooth) / factor + smooth)
    expected = np.where(smooth > 1, 1.0, np.where(smooth < 0, factor, between))
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ModelError(
            f"{file.path} holds rotary factors (rope_freqs.weight) that are not Llama 3's; "
            "these scalings are known: linear, llama3, yarn"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": trained,
    }


def write_weights(file: GGUFFile, targets: dict[str, Target], path: Path) -> None:
    """Write a safetensors file, one tensor in memory at a time.

    Layout: 8 bytes of header length, a JSON header padded with spaces to a multiple of 8, then the
    tensors. Source: the format's description in the safetensors project's README.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for target in targets.values():
        end = offset + 4 * int(np.prod(target.shape))
        header[target.name] = {
            "dtype": "F32",
            "shape": list(target.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for values in _ordered_weights(file, targets):
            out.write(values.astype("<f4", copy=False).data)


def _ordered_weights(file: GGUFFile, targets: dict[str, Target]) -> Iterator[NDArray[np.float32]]:
    for name, target in targets.items():
        values = file.weights(name)
        if target.interleaved_heads:
            values = separate_halves(values, target.interleaved_heads)
        yield np.ascontiguousarray(values)


def separate_halves(values: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's order of a head's rows, where row i of each half lie side by side."""
    pairs = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
