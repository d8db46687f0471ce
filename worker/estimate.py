"""What one rank needs, worked out of the model's shape alone: weights, activations, K/V.

The one home of these sums. Start-up takes the shape of K/V and, on CPUs, the least memory of a
step from here; `stoker plan` takes everything, so that what it says and what the log of a start
says agree (tests/worker/test_estimate.py holds them to it). Needs no torch.
"""

from dataclasses import dataclass
from pathlib import Path

from kvcache.geometry import KVGeometry, blocks_for
from worker.models.spec import ModelSpec
from worker.shards import Shard
from worker.stages import Stage

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}

SAMPLED_AT_ONCE = 32
"""Rows whose logits exist at the same time on a CPU. More only costs memory: half a megabyte a
row with some vocabularies, three or four times while it is sampled from."""

INT8_GROUP = 32
"""Weights that share a scale, which is a bfloat16 (worker/ops/native/kernels/linear_int8.h)."""

AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
AMX = AVX512 | {"avx512_bf16", "amx_bf16", "amx_tile"}
"""Flags of a CPU that runs a level of the kernels (worker/ops/native/kernels/program.cpp)."""

TILE_ROWS, TILE_COLUMNS, TILE_DEPTH = 16, 32, 32
"""What AMX takes at once (worker/ops/native/kernels/linear_amx.h)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How ranks hold a model: types of numbers, and whose operations read them."""

    dtype: str
    """Of weights: float32, bfloat16 or float16."""
    kv_dtype: str
    """Of K/V; int8 as well."""
    ops: str
    """reference, cpu or cuda"""
    device: str = "cpu"
    """cpu or cuda"""
    is_int8: bool = False
    """Linear layers' weights are quantized."""
    level: str = "avx512"
    """Of the CPU's kernels: amx, avx512 or avx2; they pack weights differently."""

    @property
    def activation_bytes(self) -> int:
        """Of one number between layers."""
        return 4 if self.ops == "cpu" else DTYPE_BYTES[self.dtype]

    def linear_bytes(self, out_features: int, in_features: int) -> int:
        """Of a weight as the operations hold it."""
        if self.ops != "cpu":
            return out_features * in_features * DTYPE_BYTES[self.dtype]
        if self.is_int8:
            columns = 16 if self.level == "avx2" else 32
            groups = -(-in_features // INT8_GROUP)
            return filled(out_features, columns) * groups * (INT8_GROUP + 2)
        if self.uses_tiles:
            columns, depth = filled(out_features, TILE_COLUMNS), filled(in_features, TILE_DEPTH)
            return columns * depth * DTYPE_BYTES[self.dtype]
        columns = filled(out_features, 16 if self.level == "avx2" else 64)
        return columns * in_features * DTYPE_BYTES[self.dtype]

    @property
    def uses_tiles(self) -> bool:
        """Linear layers are AMX's."""
        return self.level == "amx" and self.dtype == "bfloat16" and not self.is_int8


def filled(number: int, unit: int) -> int:
    """The next multiple of `unit`: the kernels fill up what is left over with zeros."""
    return -(-number // unit) * unit


def kernel_level(cpu_info: Path = Path("/proc/cpuinfo")) -> str:
    """Of this machine, by its CPU's flags."""
    try:
        flags = set(cpu_info.read_text().split())
    except OSError:
        return "avx512"
    return "amx" if flags >= AMX else "avx512" if flags >= AVX512 else "avx2"


def kv_geometry(
    spec: ModelSpec, shard: Shard, num_layers: int, kv_dtype: str, block_size: int
) -> KVGeometry:
    """K/V of one rank, of the `num_layers` layers of its stage."""
    return KVGeometry(
        num_layers=num_layers,
        num_kv_heads=shard.kv_heads.size,
        head_bytes=head_bytes(spec.head_dim, kv_dtype),
        block_size=block_size,
    )


def head_bytes(head_dim: int, kv_dtype: str) -> int:
    """K or V of one head of one token: int8 values are followed by the float32 to multiply
    them with."""
    return head_dim * DTYPE_BYTES[kv_dtype] + (4 if kv_dtype == "int8" else 0)


def weight_bytes(
    spec: ModelSpec, shard: Shard, stage: Stage, form: Form, max_model_len: int
) -> int:
    """All that a rank reads of a checkpoint, as it holds it, and the table of angles."""
    total = read_bytes(spec, shard, stage, form) + max_model_len * spec.head_dim * 4
    rows, hidden = shard.vocab_rows.size, spec.hidden_size
    if stage.is_first and spec.ties_embeddings:
        total += 0 if stage.is_last else form.linear_bytes(rows, hidden)
    elif stage.is_first:
        total += rows * hidden * DTYPE_BYTES[form.dtype]
    return total


def read_bytes(spec: ModelSpec, shard: Shard, stage: Stage, form: Form) -> int:
    """Of `weight_bytes` what every step reads, however few tokens it has."""
    total = stage.layers.size * _layer_bytes(spec, shard, form)
    if stage.is_last:
        total += spec.hidden_size * form.activation_bytes
        total += form.linear_bytes(shard.vocab_rows.size, spec.hidden_size)
    return total


def _layer_bytes(spec: ModelSpec, shard: Shard, form: Form) -> int:
    hidden, columns = spec.hidden_size, shard.mlp_columns.size
    q_width, qkv_width = _widths(spec, shard)
    total = form.linear_bytes(qkv_width, hidden) + form.linear_bytes(hidden, q_width)
    total += form.linear_bytes(2 * columns, hidden) + form.linear_bytes(hidden, columns)
    vector = 2 * hidden
    vector += qkv_width if spec.has_qkv_bias else 0
    vector += hidden if spec.has_o_bias else 0
    vector += 2 * columns + hidden if spec.has_mlp_bias else 0
    vector += 2 * spec.head_dim if spec.has_head_norms else 0
    return total + vector * form.activation_bytes


def activation_bytes(
    spec: ModelSpec, shard: Shard, stage: Stage, form: Form, *, max_tokens: int, max_seqs: int
) -> int:
    """The most that a step of `max_tokens` tokens of `max_seqs` sequences takes beside weights and
    K/V. CPUs: the buffers of `worker.ops.cpu_program`, exactly; others: an upper bound."""
    rows = min(max_seqs, max_tokens)
    sampled = min(rows, SAMPLED_AT_ONCE) if form.device == "cpu" else rows
    if form.ops == "cpu":
        logits = _logits_bytes(spec, shard, sampled) if stage.is_last else 0
        return _program_bytes(spec, shard, stage, form, max_tokens, rows) + logits
    hidden, columns = spec.hidden_size, shard.mlp_columns.size
    q_width, _ = _widths(spec, shard)
    layer = max_tokens * (4 * hidden + q_width + 3 * columns) * form.activation_bytes
    if not stage.is_last:
        return layer
    # A row of logits as it comes, as float32 here and gathered, and what it is sampled from.
    width = shard.vocab_rows.size * (form.activation_bytes + 4) + spec.vocab_size * (4 + 4 + 8)
    return max(layer, sampled * width)


def _program_bytes(
    spec: ModelSpec, shard: Shard, stage: Stage, form: Form, max_tokens: int, rows: int
) -> int:
    hidden, columns = spec.hidden_size, shard.mlp_columns.size
    q_width, qkv_width = _widths(spec, shard)
    of_linear = {qkv_width, hidden, 2 * columns}  # layers of one width share a buffer
    width = 2 * hidden + sum(of_linear) + q_width + columns
    total = max_tokens * width * 4
    if stage.is_last:
        total += rows * (q_width + hidden) * 4  # the rows that are sampled, taken out
    in_widths = (hidden, q_width, columns)
    if form.is_int8:
        lanes = INT8_GROUP * _quantum_bytes(form) + 8
        total += max_tokens * lanes * sum({-(-width // INT8_GROUP) for width in in_widths})
    if form.uses_tiles:  # rows of x in two halves
        depths = {filled(width, TILE_DEPTH) for width in in_widths}
        total += filled(max_tokens, TILE_ROWS) * sum(depths) * 4
    return total


def _quantum_bytes(form: Form) -> int:
    """Of a quantized activation: 16 bits where products are summed in 32, else 8."""
    return 2 if form.level == "avx2" else 1


def _logits_bytes(spec: ModelSpec, shard: Shard, rows: int) -> int:
    gathered = spec.vocab_size if shard.size > 1 and shard.rank == 0 else 0
    return rows * (shard.vocab_rows.size + gathered) * 4


def _widths(spec: ModelSpec, shard: Shard) -> tuple[int, int]:
    """Of a shard's queries, and of its queries, keys and values."""
    queries = shard.q_heads.size * spec.head_dim
    return queries, queries + 2 * shard.kv_heads.size * spec.head_dim


def largest_context(num_blocks: int, block_size: int, max_model_len: int) -> int:
    """Tokens of the longest sequence that such a pool holds alone."""
    return min(num_blocks * block_size, max_model_len)


def requests_at_once(num_blocks: int, block_size: int, num_tokens: int, max_num_seqs: int) -> int:
    """Sequences of `num_tokens` tokens that run at the same time without one giving way."""
    return min(num_blocks // blocks_for(num_tokens, block_size), max_num_seqs)
