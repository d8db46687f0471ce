"""One open GGUF file: its metadata by key, checked for type, and its tensors in float32.

Reading is lazy: the file is mapped, and a tensor is de-quantized when it is asked for.
Whatever is wrong with a file comes out as a `ModelError` that names the file.
"""

from pathlib import Path
from typing import TypeVar

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
from gguf.quants import dequantize
from numpy.typing import NDArray

from cluster.errors import ModelError

Scalar = TypeVar("Scalar", int, float, str, bool)


class GGUFFile:
    """A GGUF file of one language model.

    Raises:
        ModelError: the file is missing, damaged, cut short, or a part of a split model.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise ModelError(f"{path} is not a file; a GGUF file was expected there")
        try:
            self._reader = GGUFReader(path)
            self._values = {key: field.contents() for key, field in self._reader.fields.items()}
        except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
            raise ModelError(
                f"{path} is not a whole GGUF file (damaged or cut short at "
                f"{path.stat().st_size} bytes?): {error}"
            ) from error
        self._tensors: dict[str, ReaderTensor] = {t.name: t for t in self._reader.tensors}
        if (parts := self.find("split.count", int)) is not None and parts > 1:
            raise ModelError(
                f"{path} is one of {parts} parts of a split model; join the parts into one file"
            )

    @property
    def architecture(self) -> str:
        return self.require("general.architecture", str)

    @property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def find(self, key: str, kind: type[Scalar]) -> Scalar | None:
        """The single value of `key`, or None where the file has no such key."""
        value: object = self._values.get(key)
        if value is None:
            return None
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise self._unexpected(key, kind.__name__, value)
        assert isinstance(value, kind)
        return value

    def require(self, key: str, kind: type[Scalar]) -> Scalar:
        value = self.find(key, kind)
        if value is None:
            raise ModelError(f"{self.path} has no metadata key {key!r}, which a model needs")
        return value

    def find_list(self, key: str, kind: type[Scalar]) -> list[Scalar] | None:
        """The values of an array, or None where the file has no such key."""
        values = self._values.get(key)
        if values is None:
            return None
        if not isinstance(values, list) or any(type(value) is not kind for value in values):
            raise self._unexpected(key, f"list of {kind.__name__}", values)
        return values

    def shape(self, tensor_name: str) -> tuple[int, ...]:
        """Rows first, as numpy and torch count; the file itself counts the other way round."""
        return tuple(int(size) for size in reversed(self._tensors[tensor_name].shape))

    def weights(self, tensor_name: str) -> NDArray[np.float32]:
        """De-quantize one tensor to float32, in the shape that `shape` gives."""
        tensor = self._tensors[tensor_name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            kind = GGMLQuantizationType(tensor.tensor_type).name
            raise ModelError(
                f"{self.path}: tensor {tensor_name!r} is stored as {kind}, which cannot be turned "
                f"into float32 here: {error}"
            ) from error
        return np.ascontiguousarray(values, dtype=np.float32).reshape(self.shape(tensor_name))

    def _unexpected(self, key: str, wanted: str, value: object) -> ModelError:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return ModelError(
            f"{self.path}: metadata key {key!r} should be a {wanted}, but holds a "
            f"{type(value).__name__}: {shown}"
        )
