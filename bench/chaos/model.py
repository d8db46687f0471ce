"""A model that is made at run time: the shape of Llama, the vocabulary of another, no sense."""

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
)


def make_tiny_model(folder: Path, like: Path, *, seed: int = 0) -> Path:
    """Write a random model with the tokenizer of the one in `like`.

    Its weights are large, so that its outputs are of many tokens instead of one again and again.
    """
    vocab_size = AutoConfig.from_pretrained(like).vocab_size
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    folder.mkdir(parents=True, exist_ok=True)
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (like / name).exists():
            shutil.copy(like / name, folder / name)
    return folder
