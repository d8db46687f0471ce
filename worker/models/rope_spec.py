"""What a config says of rotary position embedding. `worker.models.rope` computes it."""

from dataclasses import dataclass

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Base and scaling of the angles. Fields that a kind does not use keep their defaults."""

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_positions: int = 0
    """Context of the training before the context was extended."""
    attention_factor: float | None = None
    """Multiplies cosines and sines; None: what the kind's paper says."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    """[head_dim / 2], used if `max_positions` of the table fit the original context."""
    long_factor: tuple[float, ...] = ()
    """[head_dim / 2], used for all positions otherwise."""
