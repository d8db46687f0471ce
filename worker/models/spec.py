"""A model's shape, from its config.json alone.

The JSON is read directly: importing a whole library of models for one dictionary would
triple a worker's start. Both styles of writing are understood: `rope_theta` and
`rope_scaling` (transformers 4) and `rope_parameters` (transformers 5).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from worker.errors import ModelError, UnsupportedModel
from worker.models.registry import Architecture, find_architecture
from worker.models.rope_spec import ROPE_KINDS, RopeSpec
from worker.shards import ModelWidths
from worker.stages import Stage, deal_stages
from worker.window import NO_WINDOW


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything the decoder needs to know; numbers are the whole model's, not a shard's."""

    architecture: str
    vocab_size: int
    hidden_size: int
    mlp_columns: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    max_context_len: int
    """Most tokens of a sequence, a stretch of the rotary angles included."""
    rope: RopeSpec
    windows: tuple[int, ...]
    """Per layer, in tokens; `NO_WINDOW` where every earlier token is visible."""
    ties_embeddings: bool
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_head_norms: bool
    dtype: str
    """That of the checkpoint, as its config says."""

    @property
    def num_parameters(self) -> int:
        """Of the whole model; tied ones once. Biases and the norms of heads are left out."""
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (heads + 3 * self.mlp_columns + 2)
        tables = 1 if self.ties_embeddings else 2
        vocabulary = tables * self.vocab_size * self.hidden_size
        return self.num_layers * layer + vocabulary + self.hidden_size


class _Fields:
    """A config.json's fields by name and type; errors name the field and the file."""

    def __init__(self, fields: Mapping[str, object], file: Path, prefix: str = "") -> None:
        self._fields, self._file, self._prefix = fields, file, prefix

    def get(self, name: str) -> object:
        return self._fields.get(name)

    def has(self, name: str) -> bool:
        return self._fields.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Whether the field is there and says null; a field left out has its default."""
        return name in self._fields and self._fields[name] is None

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self._fields.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.wrong(name, f"a whole number of at least {least}", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._fields.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.wrong(name, "a number above 0", value)
        return float(value)

    def number_or_none(self, name: str) -> float | None:
        return self.number(name) if self.has(name) else None

    def boolean(self, name: str, default: bool) -> bool:
        value = self._fields.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false", value)
        return value

    def texts(self, name: str) -> list[str]:
        value = self._fields.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(name, "a list of texts", value)
        return value

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        value = self._fields.get(name)
        wanted = f"a list of {length} numbers"
        if not isinstance(value, list) or len(value) != length:
            raise self.wrong(name, wanted, value)
        if not all(isinstance(item, int | float) for item in value):
            raise self.wrong(name, wanted, value)
        return tuple(float(item) for item in value)

    def inner(self, name: str) -> "_Fields":
        value = self._fields.get(name)
        if not isinstance(value, dict):
            raise self.wrong(name, "an object", value)
        return _Fields(value, self._file, f"{self._prefix}{name}.")

    def wrong(self, name: str, wanted: str, value: object) -> ModelError:
        got = "nothing" if value is None else repr(value)
        return ModelError(f"{self._file}: {self._prefix}{name} must be {wanted}, got {got}")


def read_spec(model_dir: Path) -> ModelSpec:
    """The shape of the model in a folder.

    Raises:
        UnsupportedModel: an architecture or a setting that the decoder does not compute.
        ModelError: config.json is missing, is no JSON object, or a field is wrong.
    """
    return spec_from(read_config(model_dir), model_dir / "config.json")


def context_of(spec: ModelSpec, wanted: int | None, model_dir: Path) -> int:
    """Most tokens of a sequence: as many as are wanted, or all that the model can take.

    Raises:
        ModelError: it can take fewer.
    """
    most = spec.max_context_len
    if wanted is not None and wanted > most:
        raise ModelError(
            f"max_model_len={wanted} is above the {most} tokens of context that "
            f"{model_dir / 'config.json'} gives the model. Lower max_model_len, or extend the "
            "context there (rope_scaling)."
        )
    return wanted or most


def read_config(model_dir: Path) -> dict[str, object]:
    """A folder's config.json.

    Raises:
        ModelError: it is missing, or is no JSON object.
    """
    file = model_dir / "config.json"
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{model_dir} holds no config.json; is it a model directory?") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{file} must hold a JSON object, got a {type(content).__name__}")
    return content


def spec_from(content: Mapping[str, object], file: Path) -> ModelSpec:
    """The shape that a config says; `file` is what errors name.

    Raises:
        UnsupportedModel, ModelError: as `read_spec`.
    """
    fields = _Fields(content, file)
    return _spec(fields, *find_architecture(fields.texts("architectures")))


def model_widths(spec: ModelSpec) -> ModelWidths:
    """What of the model is dealt out to ranks."""
    return ModelWidths(
        num_q_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        mlp_columns=spec.mlp_columns,
        vocab_rows=spec.vocab_size,
    )


def model_stages(spec: ModelSpec, size: int) -> tuple[Stage, ...]:
    """The model's layers dealt to pipeline stages.

    The output layer counts half: a decode step needs it for all of its tokens, a prompt for one.

    Raises:
        ImpossibleStages: there are more stages than layers.
    """
    attention = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    layer = spec.hidden_size * (attention + 3 * spec.mlp_columns)
    return deal_stages(spec.num_layers, size, spec.hidden_size * spec.vocab_size / layer / 2)


def _spec(fields: _Fields, name: str, architecture: Architecture) -> ModelSpec:
    _refuse_unknown_settings(fields, name)
    num_layers = fields.integer("num_hidden_layers")
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", architecture.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise fields.wrong("head_dim", "even, since rotation pairs dimensions", head_dim)
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        wanted = f"a divisor of num_attention_heads ({num_heads})"
        raise fields.wrong("num_key_value_heads", wanted, num_kv_heads)
    max_positions = fields.integer("max_position_embeddings", architecture.max_position_embeddings)
    has_attention_bias = fields.boolean("attention_bias", default=False)
    rope = _rope(fields, head_dim, max_positions)
    return ModelSpec(
        architecture=name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        mlp_columns=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", architecture.rms_norm_eps),
        max_position_embeddings=max_positions,
        max_context_len=_max_context_len(rope, max_positions),
        rope=rope,
        windows=_windows(fields, architecture, num_layers),
        ties_embeddings=fields.boolean("tie_word_embeddings", default=False),
        has_qkv_bias=_first(architecture.qkv_bias, has_attention_bias),
        has_o_bias=_first(architecture.o_bias, has_attention_bias),
        has_mlp_bias=architecture.can_have_mlp_bias and fields.boolean("mlp_bias", default=False),
        has_head_norms=architecture.has_head_norms,
        dtype=_dtype(fields),
    )


def _max_context_len(rope: RopeSpec, max_positions: int) -> int:
    """Configs of these kinds give the context of the training, and a factor that extends it;
    yarn's often give the extended one as well. Other kinds' positions are extended already."""
    if rope.kind in ("linear", "dynamic"):
        return int(max_positions * rope.factor)
    if rope.kind == "yarn":
        return max(max_positions, int(rope.original_max_positions * rope.factor))
    return max_positions


def _first(fixed: bool | None, configured: bool) -> bool:
    return configured if fixed is None else fixed


def _dtype(fields: _Fields) -> str:
    value = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    if value not in ("float32", "bfloat16", "float16"):
        raise fields.wrong("dtype", "float32, bfloat16 or float16", value)
    return str(value)


def _refuse_unknown_settings(fields: _Fields, name: str) -> None:
    """Settings that would change the result silently if they were ignored."""
    activation = fields.get("hidden_act")
    if activation not in (None, "silu", "swish"):
        raise UnsupportedModel(f"{name} with hidden_act={activation!r}: only silu is supported")
    if fields.has("quantization_config"):
        raise UnsupportedModel(
            f"{name} with a quantization_config is not supported; use the float32, bfloat16 or "
            "float16 checkpoint"
        )


def _windows(fields: _Fields, architecture: Architecture, num_layers: int) -> tuple[int, ...]:
    if architecture.default_window is None:
        return (NO_WINDOW,) * num_layers
    if fields.is_null("sliding_window"):
        return (NO_WINDOW,) * num_layers
    window = fields.integer("sliding_window", architecture.default_window)
    if not architecture.window_needs_switch:
        return (window,) * num_layers
    if not fields.boolean("use_sliding_window", default=False):
        return (NO_WINDOW,) * num_layers
    kinds = fields.texts("layer_types")
    if not kinds:
        first = fields.integer("max_window_layers", 28, least=0)
        return tuple(window if layer >= first else NO_WINDOW for layer in range(num_layers))
    known = {"sliding_attention": window, "full_attention": NO_WINDOW}
    if len(kinds) != num_layers or not set(kinds) <= set(known):
        raise fields.wrong("layer_types", f"{num_layers} of {', '.join(sorted(known))}", kinds)
    return tuple(known[kind] for kind in kinds)


def _rope(fields: _Fields, head_dim: int, max_positions: int) -> RopeSpec:
    theta = fields.number("rope_theta", 10_000.0)
    name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    if not fields.has(name):
        return RopeSpec(theta=theta)
    rope = fields.inner(name)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    kind = "longrope" if kind == "su" else kind
    if kind not in ROPE_KINDS:
        raise UnsupportedModel(
            f"rope type {kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}"
        )
    share = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if share != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor={share:g} is not supported, only 1")
    theta = rope.number("rope_theta", theta)
    if kind == "default":
        return RopeSpec(theta=theta)
    return _scaled_rope(fields, rope, str(kind), theta, head_dim, max_positions)


def _scaled_rope(
    fields: _Fields, rope: _Fields, kind: str, theta: float, head_dim: int, max_positions: int
) -> RopeSpec:
    original = max_positions
    if kind in ("yarn", "llama3", "longrope"):
        original = rope.integer("original_max_position_embeddings", max_positions)
        original = fields.integer("original_max_position_embeddings", original)
    ratio = max_positions / original if kind in ("yarn", "longrope") else None
    is_long = kind == "longrope"
    return RopeSpec(
        kind=kind,
        theta=theta,
        factor=rope.number("factor", ratio),
        original_max_positions=original,
        attention_factor=rope.number_or_none("attention_factor"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        mscale=rope.number_or_none("mscale"),
        mscale_all_dim=rope.number_or_none("mscale_all_dim"),
        truncate=rope.boolean("truncate", default=True),
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        short_factor=rope.numbers("short_factor", head_dim // 2) if is_long else (),
        long_factor=rope.numbers("long_factor", head_dim // 2) if is_long else (),
    )
