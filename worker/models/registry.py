"""Which architectures the decoder computes, and how each differs from the others."""

from dataclasses import dataclass

from worker.errors import UnsupportedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What a `*ForCausalLM` class means beyond the numbers of its config."""

    head_dim: int | None = None
    """Where the config does not give one; None: hidden_size / num_attention_heads."""
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    qkv_bias: bool | None = None
    """None: the config's `attention_bias`."""
    o_bias: bool | None = None
    """None: the config's `attention_bias`."""
    can_have_mlp_bias: bool = False
    has_head_norms: bool = False
    """RMS norms on every query and key head before the rotation."""
    default_window: int | None = None
    """Sliding window of a config that does not mention one."""
    window_needs_switch: bool = False
    """The window counts only with `use_sliding_window`, and only from `max_window_layers` on."""


# Defaults are those of the published configuration classes, for configs that leave them out.
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(max_position_embeddings=2048, can_have_mlp_bias=True),
    "MistralForCausalLM": Architecture(
        max_position_embeddings=131_072, qkv_bias=False, o_bias=False, default_window=4096
    ),
    "Qwen2ForCausalLM": Architecture(
        max_position_embeddings=32_768,
        qkv_bias=True,
        o_bias=False,
        default_window=4096,
        window_needs_switch=True,
    ),
    "Qwen3ForCausalLM": Architecture(
        head_dim=128,
        max_position_embeddings=32_768,
        has_head_norms=True,
        default_window=4096,
        window_needs_switch=True,
    ),
}


def find_architecture(names: list[str]) -> tuple[str, Architecture]:
    """The first of a config's `architectures` that is known.

    Raises:
        UnsupportedModel: none is; the message lists those that are.
    """
    for name in names:
        if name in ARCHITECTURES:
            return name, ARCHITECTURES[name]
    raise UnsupportedModel(
        f"architecture {', '.join(names) or '(none named)'} is not supported; "
        f"supported are {', '.join(sorted(ARCHITECTURES))}"
    )
