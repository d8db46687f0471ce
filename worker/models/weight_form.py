"""What lies where in memory that holds one rank's weights, as JSON, and the weights from it."""

import msgspec
import torch
from torch import Tensor

from worker.errors import UnfitWeights
from worker.models.decoder import DecoderWeights

VERSION = 1
"""Raise it whenever the same checkpoint is packed, or described, in another way."""


class _Piece(msgspec.Struct, frozen=True):
    """One tensor, dense."""

    start: int
    """In bytes."""
    shape: tuple[int, ...]
    dtype: str


def describe(weights: DecoderWeights, memory: Tensor) -> bytes:
    """The form of weights of which every tensor lies in `memory` ([N] uint8)."""

    def encode(value: object) -> object:
        if isinstance(value, torch.dtype):
            return _name(value)
        assert isinstance(value, Tensor), f"no form for a {type(value).__name__}"
        start = value.data_ptr() - memory.data_ptr()
        assert 0 <= start <= memory.nbytes - value.nbytes, "a tensor lies elsewhere"
        assert value.is_contiguous()
        return _Piece(start, tuple(value.shape), _name(value.dtype))

    return msgspec.json.encode(weights, enc_hook=encode)


def weights_in(memory: Tensor, form: bytes) -> DecoderWeights:
    """The weights that `describe` has described, as views of `memory`.

    Raises:
        UnfitWeights: no such form, or it speaks of more than there is.
    """

    def decode(kind: type, value: object) -> object:
        if kind is torch.dtype:
            return _dtype(str(value))
        assert kind is Tensor, f"no {kind.__name__} in a form"
        piece = msgspec.convert(value, _Piece)
        dtype = _dtype(piece.dtype)
        num_bytes = torch.Size(piece.shape).numel() * dtype.itemsize
        if piece.start < 0 or piece.start + num_bytes > memory.nbytes:
            raise ValueError(f"{piece} in {memory.nbytes} bytes")
        return memory[piece.start : piece.start + num_bytes].view(dtype).view(piece.shape)

    try:
        return msgspec.json.decode(form, type=DecoderWeights, dec_hook=decode)
    except (msgspec.DecodeError, ValueError, RuntimeError) as error:
        raise UnfitWeights(f"weights with a form that cannot be read: {error}") from error


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no type of numbers is called {name!r}")
    return found
