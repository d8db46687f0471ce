"""The same weights for everybody: a checkpoint for those who read one, GGUF for llama.cpp."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file

from bench.report import ROOT
from cluster.config import load_config
from cluster.models import resolve_model

FORMATS = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
"""Of llama.cpp's formats: how matrices are stored, and what the file calls itself."""
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
NORMAL, CONTROL = 1, 3
"""Kinds of tokens, in the words of the GGUF specification (tokenizer.ggml.token_type)."""
LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""The shape of TinyLlama-1.1B, which weighs too much for any cache."""


def small_model() -> Path:
    """SmolLM2-135M-Instruct, in float32; fetched on first use."""
    return resolve_model("smollm2", Path(load_config(None, None).models_dir)).resolve()


def large_model(folder: Path) -> Path:
    """A checkpoint of TinyLlama-1.1B's shape with random bfloat16 weights, made on first use.

    Its tokenizer is SmolLM2's, cut to 32,000 tokens; the traces are token ids anyway.
    """
    model = folder / "tinyllama-1.1b-shape"
    if (model / "config.json").exists():
        return model
    model.mkdir(parents=True, exist_ok=True)
    small = small_model()
    save_file(random_weights(LARGE), model / "model.safetensors", metadata={"format": "pt"})
    tokenizer = json.loads((small / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(cut_tokenizer(tokenizer, 32000)))
    for name in ("tokenizer_config.json", "generation_config.json"):
        (model / name).write_text((small / name).read_text())
    config = json.loads((small / "config.json").read_text()) | LARGE
    (model / "config.json").write_text(json.dumps(config, indent=2))
    return model


def random_weights(config: dict[str, object]) -> dict[str, torch.Tensor]:
    """Weights of a Llama of this shape, scaled so that activations neither grow nor vanish."""
    hidden, mlp, vocab, heads, kv_heads, head_dim, layers = (
        int(str(config[name]))
        for name in (
            *("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads"),
            *("num_key_value_heads", "head_dim", "num_hidden_layers"),
        )
    )
    chance = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=chance) * 0.02).to(torch.bfloat16)

    def norm() -> torch.Tensor:
        return torch.ones(hidden, dtype=torch.bfloat16)

    weights = {
        "model.embed_tokens.weight": matrix(vocab, hidden),
        "model.norm.weight": norm(),
        "lm_head.weight": matrix(vocab, hidden),
    }
    for layer in range(layers):
        weights |= {
            f"model.layers.{layer}.{name}.weight": weight
            for name, weight in {
                "input_layernorm": norm(),
                "self_attn.q_proj": matrix(heads * head_dim, hidden),
                "self_attn.k_proj": matrix(kv_heads * head_dim, hidden),
                "self_attn.v_proj": matrix(kv_heads * head_dim, hidden),
                "self_attn.o_proj": matrix(hidden, heads * head_dim),
                "post_attention_layernorm": norm(),
                "mlp.gate_proj": matrix(mlp, hidden),
                "mlp.up_proj": matrix(mlp, hidden),
                "mlp.down_proj": matrix(hidden, mlp),
            }.items()
        }
    return weights


def cut_tokenizer(tokenizer: dict, size: int) -> dict:  # type: ignore[type-arg]  # of JSON
    """A byte-pair tokenizer with its first `size` tokens, and the merges that make them."""
    model = tokenizer["model"]
    vocab = {token: i for token, i in model["vocab"].items() if i < size}

    def is_kept(merge: str | list[str]) -> bool:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        return {left, right, left + right} <= vocab.keys()

    merges = [merge for merge in model["merges"] if is_kept(merge)]
    added = [token for token in tokenizer["added_tokens"] if token["id"] < size]
    return tokenizer | {
        "model": model | {"vocab": vocab, "merges": merges},
        "added_tokens": added,
    }


def gguf_file(model: Path, form: str, folder: Path) -> Path:
    """`model` as GGUF with its matrices in one of FORMATS; made on first use."""
    path = folder / f"{model.name}.{form}.gguf"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    kind, file_kind = FORMATS[form]
    config = json.loads((model / "config.json").read_text())
    unfinished = path.with_suffix(".unfinished")
    writer = GGUFWriter(unfinished, "llama")
    write_config(writer, config)
    writer.add_file_type(file_kind)
    write_vocabulary(writer, model, config)
    for name, weight in renamed_weights(model, config):
        is_matrix = weight.ndim == 2
        stored = quantize(weight, kind) if is_matrix else weight
        writer.add_tensor(name, stored, raw_dtype=kind if is_matrix else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(path)
    return path


def write_config(writer: GGUFWriter, config: dict) -> None:  # type: ignore[type-arg]  # of JSON
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def write_vocabulary(
    writer: GGUFWriter,
    model: Path,
    config: dict,  # type: ignore[type-arg]  # of JSON
) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    control = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    tokens = {i: token for token, i in tokenizer["model"]["vocab"].items()} | control
    ids = range(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([tokens.get(i, f"<unused{i}>") for i in ids])
    writer.add_token_types([CONTROL if i in control or i not in tokens else NORMAL for i in ids])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def renamed_weights(
    model: Path,
    config: dict,  # type: ignore[type-arg]  # of JSON
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """All tensors of a checkpoint under llama.cpp's names, in float32."""
    heads = {
        "self_attn.q_proj": config["num_attention_heads"],
        "self_attn.k_proj": config["num_key_value_heads"],
    }
    with safe_open(model / "model.safetensors", framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118  # it is no dict
            weight = tensors.get_tensor(name).float().numpy()
            if name in OUTER_NAMES:
                yield OUTER_NAMES[name], weight
                continue
            _, _, layer, inner = name.removesuffix(".weight").split(".", 3)
            if inner in heads:
                weight = interleaved(weight, heads[inner])
            yield f"blk.{layer}.{NAMES[inner]}.weight", weight


def interleaved(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows of q or k with the two halves of each head interleaved, as llama.cpp rotates them."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


WORKLOADS = ROOT / "bench" / "workloads"


def trace_file(name: str, folder: Path) -> Path:
    """A trace of `bench/workloads` by its first letter, or `p`: 32 prompts of one prefix."""
    if name != "p":
        (path,) = WORKLOADS.glob(f"{name}_*.json")
        return path
    path = folder / "p_32x1000_shared.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(shared_prefix_trace()))
    return path


def shared_prefix_trace(
    count: int = 32, prefix_len: int = 1000, own_len: int = 24, max_tokens: int = 8
) -> list[dict[str, object]]:
    """Requests that begin with the same tokens and end with a few of their own."""
    chance = np.random.default_rng(4)
    prefix = chance.integers(1000, 31000, prefix_len).tolist()
    return [
        {
            "prompt_token_ids": prefix + chance.integers(1000, 31000, own_len).tolist(),
            "max_tokens": max_tokens,
        }
        for _ in range(count)
    ]
