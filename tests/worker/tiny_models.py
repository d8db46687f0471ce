"""Random models of every architecture, small enough to make in each test, and their oracle."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 97
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
"""No size is a multiple of another one that it should not depend on."""

ROPES: dict[str, dict[str, object]] = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 2.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 5000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [1.0 + 0.7 * i for i in range(8)],
    },
}


def llama(rope: str = "default", **changes: object) -> LlamaForCausalLM:
    config = LlamaConfig(**{**SHAPE, "rope_parameters": dict(ROPES[rope]), **changes})
    return LlamaForCausalLM(config)


def mistral(**changes: object) -> MistralForCausalLM:
    return MistralForCausalLM(MistralConfig(**{**SHAPE, "sliding_window": 21, **changes}))


def qwen2(**changes: object) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(Qwen2Config(**{**SHAPE, **changes}))


def qwen3(**changes: object) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, **changes}))


WINDOWED: dict[str, object] = {
    "use_sliding_window": True,
    "sliding_window": 13,
    "max_window_layers": 1,
}

MODELS = {
    "llama": llama,
    "llama_tied": lambda: llama(tie_word_embeddings=True),
    "llama_biased": lambda: llama(attention_bias=True, mlp_bias=True),
    "llama_linear": lambda: llama("linear"),
    "llama_dynamic": lambda: llama("dynamic"),
    "llama_yarn": lambda: llama("yarn"),
    "llama_yarn_mscale": lambda: llama("yarn_mscale"),
    "llama_llama3": lambda: llama("llama3"),
    "llama_longrope": lambda: llama("longrope"),
    "mistral": mistral,
    "mistral_no_window": lambda: mistral(sliding_window=None),
    "qwen2": qwen2,
    "qwen2_windowed": lambda: qwen2(**WINDOWED),
    "qwen3": qwen3,
    "qwen3_windowed": lambda: qwen3(**WINDOWED),
    "qwen3_biased": lambda: qwen3(attention_bias=True, tie_word_embeddings=True),
}
"""By name a model of each architecture, and of each setting that changes its arithmetic."""


def make_model(name: str) -> PreTrainedModel:
    """A model whose every parameter is random, also those that start as zeros and ones."""
    torch.manual_seed(sum(map(ord, name)))
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.mul_(6.0)
    return model


def save_model(name: str, folder: Path) -> tuple[PreTrainedModel, Path]:
    model = make_model(name)
    model.save_pretrained(folder)
    return model, folder


@torch.inference_mode()
def oracle_logits(
    model: PreTrainedModel, tokens: Sequence[int], *, is_extended: bool = True
) -> Tensor:
    """[len(tokens), vocabulary] float32: the model's own forward pass over the whole text.

    Tokens behind change nothing before them but the kind of `longrope` angles, which
    transformers takes from the length of the text, and a worker from its max_model_len.
    """
    text = [*tokens, *([0] * 64 if is_extended else [])]
    logits: Tensor = model(torch.tensor([text])).logits[0, : len(tokens)]
    return logits.float()


def config_of(model: PreTrainedModel) -> PreTrainedConfig:
    return model.config
