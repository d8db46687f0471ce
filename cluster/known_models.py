"""Shapes of some published models, so that `stoker plan` can be asked before anything is fetched.

Each is the part of the model's own config.json that memory depends on.
"""

from collections.abc import Mapping

LLAMA, MISTRAL = "LlamaForCausalLM", "MistralForCausalLM"
QWEN2, QWEN3 = "Qwen2ForCausalLM", "Qwen3ForCausalLM"


def _shape(
    architecture: str,
    *,
    hidden: int,
    mlp: int,
    layers: int,
    heads: tuple[int, int],
    vocab: int,
    context: int,
    ties: bool = False,
    head_dim: int | None = None,
) -> Mapping[str, object]:
    """Args: heads: those of queries, and of keys and values."""
    return {
        "architectures": [architecture],
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": head_dim or hidden // heads[0],
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "tie_word_embeddings": ties,
        "dtype": "bfloat16",
        "sliding_window": None,
    }


# fmt: off
KNOWN_MODELS: Mapping[str, Mapping[str, object]] = {
    "smollm2-135m": _shape(LLAMA, hidden=576, mlp=1536, layers=30, heads=(9, 3), vocab=49152, context=8192, ties=True),  # noqa: E501
    "smollm2-1.7b": _shape(LLAMA, hidden=2048, mlp=8192, layers=24, heads=(32, 32), vocab=49152, context=8192, ties=True),  # noqa: E501
    "tinyllama-1.1b": _shape(LLAMA, hidden=2048, mlp=5632, layers=22, heads=(32, 4), vocab=32000, context=2048),  # noqa: E501
    "llama-3.2-1b": _shape(LLAMA, hidden=2048, mlp=8192, layers=16, heads=(32, 8), vocab=128256, context=131072, ties=True),  # noqa: E501
    "llama-3.2-3b": _shape(LLAMA, hidden=3072, mlp=8192, layers=28, heads=(24, 8), vocab=128256, context=131072, ties=True),  # noqa: E501
    "llama-3.1-8b": _shape(LLAMA, hidden=4096, mlp=14336, layers=32, heads=(32, 8), vocab=128256, context=131072),  # noqa: E501
    "llama-3.1-70b": _shape(LLAMA, hidden=8192, mlp=28672, layers=80, heads=(64, 8), vocab=128256, context=131072),  # noqa: E501
    "llama-3.3-70b": _shape(LLAMA, hidden=8192, mlp=28672, layers=80, heads=(64, 8), vocab=128256, context=131072),  # noqa: E501
    "llama-3.1-405b": _shape(LLAMA, hidden=16384, mlp=53248, layers=126, heads=(128, 8), vocab=128256, context=131072),  # noqa: E501
    "mistral-7b": _shape(MISTRAL, hidden=4096, mlp=14336, layers=32, heads=(32, 8), vocab=32768, context=32768),  # noqa: E501
    "qwen2.5-0.5b": _shape(QWEN2, hidden=896, mlp=4864, layers=24, heads=(14, 2), vocab=151936, context=32768, ties=True),  # noqa: E501
    "qwen2.5-7b": _shape(QWEN2, hidden=3584, mlp=18944, layers=28, heads=(28, 4), vocab=152064, context=32768),  # noqa: E501
    "qwen2.5-32b": _shape(QWEN2, hidden=5120, mlp=27648, layers=64, heads=(40, 8), vocab=152064, context=32768),  # noqa: E501
    "qwen2.5-72b": _shape(QWEN2, hidden=8192, mlp=29568, layers=80, heads=(64, 8), vocab=152064, context=32768),  # noqa: E501
    "qwen3-0.6b": _shape(QWEN3, hidden=1024, mlp=3072, layers=28, heads=(16, 8), vocab=151936, context=40960, ties=True, head_dim=128),  # noqa: E501
    "qwen3-8b": _shape(QWEN3, hidden=4096, mlp=12288, layers=36, heads=(32, 8), vocab=151936, context=40960, head_dim=128),  # noqa: E501
    "qwen3-32b": _shape(QWEN3, hidden=5120, mlp=25600, layers=64, heads=(64, 8), vocab=151936, context=40960, head_dim=128),  # noqa: E501
}
# fmt: on
"""By the name that `stoker plan` takes."""
