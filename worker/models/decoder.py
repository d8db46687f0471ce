"""One rank's part of a Llama-shaped decoder, written once over the table of operations.

Query, key, value, gate and up projections are cut by columns and give each rank its own
heads and MLP columns; output and down projections are cut by rows and give partial sums,
which are added over the ranks (Shoeybi et al. 2019, arXiv:1909.08053, section 3). The
embedding and the output layer are cut by vocabulary rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.models.spec import ModelSpec
from worker.ops.table import AttentionShape, BatchInputs, HeadNorms, Linear, Operations
from worker.parallel import Communicator
from worker.shards import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One rank's slices of one layer."""

    input_norm: Tensor
    """[hidden]"""
    qkv: Linear
    """hidden -> this rank's query heads, K heads, V heads"""
    head_norms: HeadNorms | None
    o: Linear
    """this rank's query heads -> hidden, a partial sum"""
    mlp_norm: Tensor
    """[hidden]"""
    gate_up: Linear
    """hidden -> this rank's gate columns, up columns"""
    down: Linear
    """this rank's columns -> hidden, a partial sum"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """One rank's slices of the model."""

    embedding: Linear
    """[this rank's vocabulary rows, hidden]; `lm_head` itself if the model ties them"""
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    """[hidden]"""
    lm_head: Linear
    """hidden -> this rank's vocabulary rows"""
    cos_sin: Tensor
    """[max_model_len, head_dim] float32"""
    num_bytes: int
    """Of all of the above, copies in a set's own form included."""


class Decoder:
    """Tokens in, K/V written, hidden states and logits out. Holds weights, no sequences."""

    def __init__(
        self,
        spec: ModelSpec,
        shard: Shard,
        weights: DecoderWeights,
        ops: Operations,
        communicator: Communicator,
    ) -> None:
        self.spec, self.shard, self.weights = spec, shard, weights
        self._ops = ops
        self._communicator = communicator
        self._is_split = shard.size > 1
        self.shape = AttentionShape(
            num_heads=shard.q_heads.size,
            num_kv_heads=shard.kv_heads.size,
            head_dim=spec.head_dim,
            scale=spec.head_dim**-0.5,
        )

    def forward(self, batch: BatchInputs, kv: Sequence[Tensor], rows: Tensor | None) -> Tensor:
        """Run the layers that `kv` has K/V for: all of them, or fewer when only measuring.

        `ops.begin_step` has been called with this batch. Every rank calls this together.

        Shapes:
            kv:   per layer [2, B, block_size, num_kv_heads, head_dim], this rank's heads
            rows: [R] int64, the tokens whose hidden states are wanted; None: all
        Returns:
            [R, hidden], normed, ready for `logits`
        """
        ops, weights, eps = self._ops, self.weights, self.spec.rms_norm_eps
        x = ops.embedding(batch.token_ids, weights.embedding, self.shard.vocab_rows.start)
        residual = self._summed(x)
        normed = ops.rms_norm(residual, weights.layers[0].input_norm, eps)
        last = len(kv) - 1
        for index, layer_kv in enumerate(kv):
            layer = weights.layers[index]
            attended = self._attention(layer, normed, layer_kv, batch, self.spec.windows[index])
            if index == last and rows is not None:
                attended = ops.take_rows(attended, rows)
                residual = ops.take_rows(residual, rows)
                if rows.shape[0] == 0:
                    return residual
            x = self._summed(ops.linear(attended, layer.o))
            normed = ops.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = ops.gated_activation(ops.linear(normed, layer.gate_up))
            x = self._summed(ops.linear(x, layer.down))
            following = (
                weights.final_norm if index == last else weights.layers[index + 1].input_norm
            )
            normed = ops.add_rms_norm(x, residual, following, eps)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's columns of the logits.

        Shapes:
            hidden: [R, hidden], from `forward`
        Returns:
            [R, this rank's vocabulary rows] float32
        """
        return self._ops.linear(hidden, self.weights.lm_head).to(torch.float32)

    def _attention(
        self, layer: LayerWeights, normed: Tensor, kv: Tensor, batch: BatchInputs, window: int
    ) -> Tensor:
        """Returns [T, num_heads * head_dim]."""
        ops, shape = self._ops, self.shape
        qkv = ops.linear(normed, layer.qkv)
        q = ops.rotate_and_store(qkv, kv, batch, shape, self.weights.cos_sin, layer.head_norms)
        return ops.paged_attention(q, kv, batch, shape, window)

    def _summed(self, partial: Tensor) -> Tensor:
        return self._ops.all_reduce(partial, self._communicator) if self._is_split else partial
