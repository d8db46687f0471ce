"""One rank's part of a Llama-shaped decoder, written once over the table of operations.

A rank holds the layers of its pipeline stage, and of each layer its tensor-parallel slice.

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
from worker.stages import Stage


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

    embedding: Linear | None
    """[this rank's vocabulary rows, hidden]; `lm_head` itself if the model ties them and there is
    one stage only; None: not the first stage"""
    layers: tuple[LayerWeights, ...]
    """Of this rank's stage"""
    final_norm: Tensor | None
    """[hidden]; None: not the last stage"""
    lm_head: Linear | None
    """hidden -> this rank's vocabulary rows; None: not the last stage"""
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
        stage: Stage,
        weights: DecoderWeights,
        ops: Operations,
        communicator: Communicator,
    ) -> None:
        self.spec, self.shard, self.stage, self.weights = spec, shard, stage, weights
        self._windows = spec.windows[stage.layers.as_slice()]
        self._ops = ops
        self._communicator = communicator
        self._is_split = shard.size > 1
        self.shape = AttentionShape(
            num_heads=shard.q_heads.size,
            num_kv_heads=shard.kv_heads.size,
            head_dim=spec.head_dim,
            scale=spec.head_dim**-0.5,
        )

    def forward(
        self,
        batch: BatchInputs,
        kv: Sequence[Tensor],
        rows: Tensor | None,
        incoming: Tensor | None = None,
    ) -> Tensor:
        """Run the layers that `kv` has K/V for: all of the stage, or fewer when only measuring.

        `ops.begin_step` has been called with this batch. Every rank of the stage calls this
        together.

        Shapes:
            kv:       per layer [2, B, block_size, num_kv_heads, head_dim], this rank's heads
            rows:     [R] int64, the tokens whose hidden states are wanted; None: all. For the
                last stage: any other one passes all on.
            incoming: [T, hidden], what the stage before has returned; written. None: the first.
        Returns:
            [R, hidden], normed, ready for `logits`; from any but the last stage [T, hidden], the
            residual stream
        """
        ops, weights, eps = self._ops, self.weights, self.spec.rms_norm_eps
        residual = self._embedded(batch) if incoming is None else incoming
        normed = ops.rms_norm(residual, weights.layers[0].input_norm, eps)
        last = len(kv) - 1
        for index, layer_kv in enumerate(kv):
            layer = weights.layers[index]
            attended = self._attention(layer, normed, layer_kv, batch, self._windows[index])
            if index == last and rows is not None and self.stage.is_last:
                attended = ops.take_rows(attended, rows)
                residual = ops.take_rows(residual, rows)
                if rows.shape[0] == 0:
                    return residual
            x = self._summed(ops.linear(attended, layer.o))
            normed = ops.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = ops.gated_activation(ops.linear(normed, layer.gate_up))
            x = self._summed(ops.linear(x, layer.down))
            normed = ops.add_rms_norm(x, residual, self._norm_after(index, last), eps)
        return normed if self.stage.is_last else residual

    def _embedded(self, batch: BatchInputs) -> Tensor:
        assert self.weights.embedding is not None, "only the first stage embeds"
        first_id = self.shard.vocab_rows.start
        return self._summed(self._ops.embedding(batch.token_ids, self.weights.embedding, first_id))

    def _norm_after(self, index: int, last: int) -> Tensor:
        """What follows a layer. Where that is another stage, its norm is made there, and any will
        do: adding to the residual stream is what counts."""
        if index < last:
            return self.weights.layers[index + 1].input_norm
        final_norm = self.weights.final_norm
        return self.weights.layers[index].input_norm if final_norm is None else final_norm

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's columns of the logits.

        Shapes:
            hidden: [R, hidden], from `forward`
        Returns:
            [R, this rank's vocabulary rows] float32
        """
        assert self.weights.lm_head is not None, "only the last stage has the output layer"
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
