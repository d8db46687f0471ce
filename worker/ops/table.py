"""The dozen operations that a decoder calls, and the tensors of one step.

Three sets implement `Operations`, chosen by name: `reference` (plain torch, slow and
obvious: the oracle of every test), `cpu` and `cuda`. Model code is written once over this
table. Nothing here waits for the device: a set that runs on one may be captured into a
CUDA graph, so what changes from step to step lives in the tensors of `BatchInputs`, and
the integers beside them are upper bounds known to the host.

Sampling is not here: it works on logits in float32 and belongs to `worker.sampler`.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from worker.parallel import Communicator


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Heads of one shard. Query head h reads K/V head h // (num_heads // num_kv_heads)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor of the scores, usually head_dim ** -0.5."""

    @property
    def qkv_width(self) -> int:
        """Columns of the fused projection: all query heads, then K heads, then V heads."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInputs:
    """One step as flat tensors: T tokens of S slices, slice after slice.

    A *cell* is one token's place in the pool: block * block_size + offset in the block.
    Rows may be padding (a step padded to the size of a captured graph): such a token has
    cell -1, such a slice has context length 0, and what comes out for them is unspecified
    but finite; they write nothing to the pool.
    """

    token_ids: Tensor
    """[T] int64"""
    positions: Tensor
    """[T] int64, position of each token in its sequence"""
    cells: Tensor
    """[T] int64, where each token's K/V are written"""
    slice_offsets: Tensor
    """[S + 1] int32, slice s holds tokens [slice_offsets[s], slice_offsets[s + 1])"""
    block_tables: Tensor
    """[S, M] int32, blocks of each slice's sequence in order; entries past its context are
    anything, also -1"""
    context_lens: Tensor
    """[S] int32, tokens in cells once this step's are written; the slice's last token has
    position context_len - 1"""
    max_slice_len: int
    """No slice has more tokens; 1 says that all are decodes."""
    max_context_len: int
    """No slice sees more tokens."""

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_slices(self) -> int:
        return self.context_lens.shape[0]


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of every query and key head before the rotation (Qwen3)."""

    q_weight: Tensor
    """[head_dim]"""
    k_weight: Tensor
    """[head_dim]"""
    eps: float


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight in the form that one set of operations likes best, and its bias."""

    weight: Tensor
    """Opaque to everybody but the set that packed it."""
    bias: Tensor | None
    """[out_features], in the dtype of activations"""
    out_features: int
    in_features: int
    dtype: torch.dtype
    """Of the weight's values."""
    is_packed: bool = False
    """Whether the set has laid it out in its own way."""


class Operations(Protocol):
    """What a decoder asks of the hardware. Activations, biases and weights of norms have the
    dtype that `activation_dtype` says; inputs are contiguous in their last dimension."""

    name: str

    def activation_dtype(self, weights: torch.dtype) -> torch.dtype:
        """What the set computes in between linear layers whose weights have this type."""
        ...

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Bring a weight into the set's own form, once, at load.

        Shapes:
            weight: [out_features, in_features]; may be reused or kept, so the caller gives
                it up unless it is tied to the embedding, which is never written
            bias:   [out_features]
        """
        ...

    def pack_embedding(self, table: Tensor) -> Linear:
        """The embedding of a model whose output layer has a weight of its own (else that one's
        `pack_linear` serves as both).

        Shapes:
            table: [V, hidden], V ids in the shard
        """
        ...

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """x @ weight.T + bias.

        Shapes:
            x: [T, in_features]
        Returns:
            [T, out_features], contiguous
        """
        ...

    def embedding(self, token_ids: Tensor, table: Linear, first_id: int) -> Tensor:
        """Rows of one shard of the embedding; zeros for tokens that other shards hold.

        Shapes (V ids in the shard):
            token_ids: [T] int64
            table:     [V, hidden], of the ids [first_id, first_id + V)
        Returns:
            [T, hidden]; summed over all shards it is the embedding
        """
        ...

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """Some rows of x.

        Shapes:
            x:    [T, columns]
            rows: [R] int64
        Returns:
            [R, columns]
        """
        ...

    def all_reduce(self, partial: Tensor, communicator: Communicator) -> Tensor:
        """`communicator.all_reduce`, as part of the step. The partial sum is given up."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32.

        Shapes:
            x:      [T, hidden]
            weight: [hidden]
        Returns:
            [T, hidden]

        Source: Zhang and Sennrich 2019 (arXiv:1910.07467), section 4.
        """
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to the residual stream in place, and return the stream's RMS norm.

        Shapes:
            x:        [T, hidden]; may be overwritten
            residual: [T, hidden]; written
        Returns:
            [T, hidden]
        """
        ...

    def begin_step(self, batch: BatchInputs, shape: AttentionShape, block_size: int) -> None:
        """Prepare for the layers of one step; called once, before them, and recorded with them
        where a step is recorded (`worker.graphs`).

        A set may derive here, once instead of in each layer, what it wants to know of the
        batch, and keep it until the next call. `rotate_and_store` and `paged_attention` are then
        called with this same batch and shape.
        """
        ...

    def rotate_and_store(
        self,
        qkv: Tensor,
        kv: Tensor,
        batch: BatchInputs,
        shape: AttentionShape,
        cos_sin: Tensor,
        norms: HeadNorms | None,
    ) -> Tensor:
        """Norm (if any) and rotate query and key heads, and write K and V to their cells.

        Rotation pairs dimension i with i + head_dim / 2 ("rotate half"), in float32.
        K/V of all slices are written before any slice attends: a slice may share blocks
        that another slice of the same step writes.

        Shapes (B blocks in the pool, P positions):
            qkv:     [T, shape.qkv_width]; may be overwritten
            kv:      [2, B, block_size, num_kv_heads, head_dim]; K, then V; written
            cos_sin: [P, head_dim] float32, cosines of the head_dim / 2 angles, then sines
        Returns:
            the query heads, [T, num_heads, head_dim]; heads and dimensions are contiguous,
            the stride between tokens may be larger

        Source: Su et al. 2021 (arXiv:2104.09864), section 3.4.2.
        """
        ...

    def paged_attention(
        self, q: Tensor, kv: Tensor, batch: BatchInputs, shape: AttentionShape, window: int
    ) -> Tensor:
        """Causal attention of each slice's tokens over its own sequence's cached K/V.

        A token at position p sees positions j <= p with p - j < window, or all j <= p if
        window is NO_WINDOW. Scores and softmax are float32.

        Shapes (M blocks in the longest table):
            q:                  [T, num_heads, head_dim], as `rotate_and_store` returns it
            kv:                 [2, B, block_size, num_kv_heads, head_dim]
            batch.block_tables: [S, M]
        Returns:
            [T, num_heads * head_dim], contiguous, in q's dtype

        Source: paged K/V, Kwon et al. 2023 (arXiv:2309.06180), section 4.1.
        """
        ...

    def gated_activation(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up.

        Shapes:
            gate_up: [T, 2 * columns]; gate, then up; may be overwritten
        Returns:
            [T, columns], contiguous

        Source: Shazeer 2020 (arXiv:2002.05202), section 2.
        """
        ...
