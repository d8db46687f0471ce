"""From a checkpoint's tensors to one rank's slices, fused and packed for its operations."""

from dataclasses import replace

import torch
from torch import Tensor

from worker.host_memory import trim_heap
from worker.models.decoder import DecoderWeights, LayerWeights
from worker.models.rope import rope_table
from worker.models.spec import ModelSpec
from worker.ops.table import HeadNorms, Linear, Operations
from worker.shards import Shard, Span
from worker.stages import Stage
from worker.weight_memory import SharedArena
from worker.weights import Checkpoint


class WeightLoader:
    """Reads one rank's slices, one layer at a time, so that at most one layer exists twice."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        shard: Shard,
        stage: Stage,
        ops: Operations,
        device: torch.device,
        arena: SharedArena | None = None,
    ) -> None:
        """`arena`: where every tensor is to lie; None: each in memory of its own. The operations
        pack into it already."""
        self._arena = arena
        self._checkpoint, self._spec, self._shard, self._stage = checkpoint, spec, shard, stage
        self._ops, self._device = ops, device
        self._q_rows = _scaled(shard.q_heads, spec.head_dim)
        self._kv_rows = _scaled(shard.kv_heads, spec.head_dim)
        self._num_bytes = 0

    def load(self, max_positions: int) -> DecoderWeights:
        """All of this rank's weights, and the rotary table for `max_positions`.

        Raises:
            DamagedCheckpoint: a tensor is missing, unreadable or of another shape.
        """
        spec, stage = self._spec, self._stage
        lm_head = self._lm_head() if stage.is_last else None
        embedding = self._embedding(lm_head) if stage.is_first else None
        layers = tuple(self._layer(index) for index in range(stage.layers.start, stage.layers.stop))
        final_norm = None
        if stage.is_last:
            final_norm = self._vector("model.norm.weight", spec.hidden_size)
        trim_heap()
        cos_sin = rope_table(spec.rope, spec.head_dim, max_positions).to(self._device)
        cos_sin = self._placed(cos_sin)
        return DecoderWeights(
            embedding=embedding,
            layers=layers,
            final_norm=final_norm,
            lm_head=lm_head,
            cos_sin=cos_sin,
            num_bytes=self._num_bytes + cos_sin.nbytes,
        )

    def _embedding(self, lm_head: Linear | None) -> Linear:
        """Where the model ties them, the output layer's own values, rounded as they are there."""
        if self._spec.ties_embeddings:
            return self._lm_head() if lm_head is None else lm_head
        return self._kept(self._ops.pack_embedding(self._vocabulary("model.embed_tokens.weight")))

    def _lm_head(self) -> Linear:
        is_tied = self._spec.ties_embeddings
        name = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
        return self._pack(self._vocabulary(name), None)

    def _vocabulary(self, name: str) -> Tensor:
        spec = self._spec
        shape = (spec.vocab_size, spec.hidden_size)
        return self._read(name, shape, rows=self._shard.vocab_rows)

    def _layer(self, index: int) -> LayerWeights:
        spec, hidden = self._spec, self._spec.hidden_size
        layer = f"model.layers.{index}."
        trim_heap()  # small tensors that stay would keep the holes of large ones that went
        return LayerWeights(
            input_norm=self._vector(layer + "input_layernorm.weight", hidden),
            qkv=self._qkv(layer + "self_attn."),
            head_norms=self._head_norms(layer + "self_attn.") if spec.has_head_norms else None,
            o=self._by_rows(
                layer + "self_attn.o_proj",
                spec.num_heads * spec.head_dim,
                self._q_rows,
                has_bias=spec.has_o_bias,
            ),
            mlp_norm=self._vector(layer + "post_attention_layernorm.weight", hidden),
            gate_up=self._gate_up(layer + "mlp."),
            down=self._by_rows(
                layer + "mlp.down_proj",
                spec.mlp_columns,
                self._shard.mlp_columns,
                has_bias=spec.has_mlp_bias,
            ),
        )

    def _qkv(self, prefix: str) -> Linear:
        spec = self._spec
        q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        return self._by_columns(
            (
                (prefix + "q_proj", q_width, self._q_rows),
                (prefix + "k_proj", kv_width, self._kv_rows),
                (prefix + "v_proj", kv_width, self._kv_rows),
            ),
            has_bias=spec.has_qkv_bias,
        )

    def _gate_up(self, prefix: str) -> Linear:
        width, columns = self._spec.mlp_columns, self._shard.mlp_columns
        return self._by_columns(
            ((prefix + "gate_proj", width, columns), (prefix + "up_proj", width, columns)),
            has_bias=self._spec.has_mlp_bias,
        )

    def _head_norms(self, prefix: str) -> HeadNorms:
        width = self._spec.head_dim
        return HeadNorms(
            q_weight=self._vector(prefix + "q_norm.weight", width),
            k_weight=self._vector(prefix + "k_norm.weight", width),
            eps=self._spec.rms_norm_eps,
        )

    def _by_columns(self, parts: tuple[tuple[str, int, Span], ...], *, has_bias: bool) -> Linear:
        """Projections of the same input, one below the other: (name, whole width, own rows)."""
        hidden = self._spec.hidden_size
        weights = [
            self._read(name + ".weight", (width, hidden), rows=span) for name, width, span in parts
        ]
        weight = torch.cat(weights)
        biases = [
            self._read_vector(name + ".bias", width, span)
            for name, width, span in parts
            if has_bias
        ]
        return self._pack(weight, torch.cat(biases) if has_bias else None)

    def _by_rows(self, name: str, width: int, columns: Span, *, has_bias: bool) -> Linear:
        """A projection whose input is this rank's columns. Rank 0's partial sum has the bias."""
        hidden = self._spec.hidden_size
        weight = self._read(name + ".weight", (hidden, width), columns=columns)
        bias = self._read_vector(name + ".bias", hidden) if has_bias else None
        return self._pack(weight, bias if self._shard.rank == 0 else None)

    def _pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return self._kept(self._ops.pack_linear(weight, bias))

    def _kept(self, packed: Linear) -> Linear:
        """In memory of its own; what the checkpoint has lent for it is not used any more."""
        weight = packed.weight if packed.is_packed else self._placed(packed.weight)
        if self._checkpoint.lends(weight):
            weight = weight.clone()
        bias = None if packed.bias is None else self._placed(packed.bias)
        self._checkpoint.take_back()
        self._num_bytes += weight.nbytes
        return replace(packed, weight=weight, bias=bias)

    def _placed(self, tensor: Tensor) -> Tensor:
        """In the arena, if there is one."""
        return tensor if self._arena is None else self._arena.keep(tensor)

    def _vector(self, name: str, width: int) -> Tensor:
        """The weights of a norm, in the dtype of activations."""
        return self._placed(self._read_vector(name, width))

    def _read_vector(self, name: str, width: int, span: Span | None = None) -> Tensor:
        """A bias or the weights of a norm, in the dtype of activations."""
        vector = self._checkpoint.read(name, (width,), rows=span).to(self._device)
        vector = vector.to(self._ops.activation_dtype(vector.dtype))
        self._num_bytes += vector.nbytes
        return vector

    def _read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: Span | None = None,
        columns: Span | None = None,
    ) -> Tensor:
        """A weight on its device, or lent by the checkpoint until it is packed."""
        return self._checkpoint.lend(name, shape, rows=rows, columns=columns).to(self._device)


def _scaled(heads: Span, head_dim: int) -> Span:
    return Span(heads.start * head_dim, heads.stop * head_dim)
