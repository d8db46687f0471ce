"""Weight files in the safetensors format, of which each rank reads its slices only.

Files are mapped, not read: bytes outside a rank's slices never leave the disk. A tensor is
converted to the wanted type as it is read, or lent as it lies in the file, and its pages are
given up when it was used, so no second copy of the whole ever exists.
"""

import ctypes
import json
import mmap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.errors import DamagedCheckpoint
from worker.shards import Span

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_DTYPES = ("F32", "BF16", "F16")


Report: TypeAlias = Callable[[int, int], None]
"""Takes (bytes gone through, bytes in all)."""


class _LazyTensor(Protocol):
    """What `safe_open(...).get_slice` returns."""

    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, index: tuple[slice, ...]) -> Tensor: ...


class _OpenFile(Protocol):
    """What `safe_open` returns."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _LazyTensor: ...


class Checkpoint:
    """The tensors of one model directory by name, in one file or several.

    Use as a context: the files stay mapped until it ends.
    """

    def __init__(
        self, model_dir: Path, dtype: torch.dtype, report: Report = lambda done, total: None
    ) -> None:
        """Open every file.

        Args:
            report: told of each tensor how many bytes of the files were gone through by then,
                and how many they have; a rank goes through a tensor when it reads its slice.

        Raises:
            DamagedCheckpoint: no weight file, or one that is missing, truncated or unreadable.
        """
        self._model_dir, self._dtype = model_dir, dtype
        self._report = report
        self._done_bytes = self._total_bytes = 0
        self._open_files = ExitStack()
        self._by_name: dict[str, tuple[Path, _OpenFile]] = {}
        self._lent: list[Tensor] = []
        """Whole tensors in the mapped files of which something may still be in use."""
        try:
            for file in _weight_files(model_dir):
                opened = self._open(file)
                self._total_bytes += file.stat().st_size
                self._by_name.update((name, (file, opened)) for name in opened.keys())  # noqa: SIM118
        except BaseException:
            self._open_files.close()
            raise

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._by_name.clear()
        self._lent.clear()
        self._open_files.close()

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: Span | None = None,
        columns: Span | None = None,
    ) -> Tensor:
        """A tensor, or the rows or columns of it that are wanted, in memory of its own.

        Raises:
            DamagedCheckpoint: as for `lend`.
        """
        lent = self.lend(name, shape, rows=rows, columns=columns)
        return lent.clone() if self.lends(lent) else lent

    def lend(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: Span | None = None,
        columns: Span | None = None,
    ) -> Tensor:
        """A tensor, or the rows or columns of it that are wanted, to be used until `take_back`.

        It may be a view of the mapped file, which would fault if the file changed.

        Raises:
            DamagedCheckpoint: it is missing, or not of `shape` (that of the whole tensor), or
                not of a floating point type, or cannot be read.
        """
        whole = self._whole(name, shape)
        self._lent.append(whole)
        wanted = [slice(None)] * len(shape)
        for axis, span in enumerate((rows, columns)):
            if span is not None:
                wanted[axis] = span.as_slice()
        return whole[tuple(wanted)].to(self._dtype)

    def lends(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in what was lent since `take_back`."""
        at = tensor.data_ptr()
        return any(whole.data_ptr() <= at < _end_of(whole) for whole in self._lent)

    def take_back(self) -> None:
        """Nothing that was lent is in use any more: pages of files are not memory of ours."""
        for whole in self._lent:
            start = whole.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
            # A failure costs memory only; the pages come back if somebody reads them after all.
            _libc().madvise(
                ctypes.c_void_p(start), ctypes.c_size_t(_end_of(whole) - start), mmap.MADV_DONTNEED
            )
        self._lent.clear()

    def _whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._by_name:
            raise DamagedCheckpoint(
                self._model_dir,
                f"missing from the weight files; wanted shape {list(shape)}",
                tensor=name,
            )
        file, opened = self._by_name[name]
        lazy = opened.get_slice(name)
        found = tuple(lazy.get_shape())
        if found != shape:
            raise DamagedCheckpoint(
                file, f"wanted shape {list(shape)}, got {list(found)}", tensor=name
            )
        if lazy.get_dtype() not in _DTYPES:
            raise DamagedCheckpoint(
                file,
                f"wanted one of the types {', '.join(_DTYPES)}, got {lazy.get_dtype()}",
                tensor=name,
            )
        try:
            whole = lazy[(slice(None),) * len(shape)]
        except (SafetensorError, OSError, ValueError) as error:
            raise DamagedCheckpoint(file, f"cannot be read: {error}", tensor=name) from error
        self._done_bytes += whole.nbytes
        self._report(self._done_bytes, self._total_bytes)
        return whole

    def _open(self, file: Path) -> _OpenFile:
        try:
            opened: _OpenFile = self._open_files.enter_context(safe_open(file, framework="pt"))
        except FileNotFoundError:
            raise DamagedCheckpoint(file, f"missing, though {INDEX_FILE} names it") from None
        except (SafetensorError, OSError) as error:
            size = file.stat().st_size
            raise DamagedCheckpoint(
                file, f"not a whole safetensors file ({size} bytes): {error}. Fetch it again"
            ) from error
        return opened


def _end_of(tensor: Tensor) -> int:
    """The address after a contiguous tensor's last byte."""
    return tensor.data_ptr() + tensor.nbytes


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _weight_files(model_dir: Path) -> list[Path]:
    index = model_dir / INDEX_FILE
    if (model_dir / SINGLE_FILE).exists() and not index.exists():
        return [model_dir / SINGLE_FILE]
    if not index.exists():
        files = sorted(model_dir.glob("*.safetensors"))
        if not files:
            others = sorted(path.name for path in model_dir.iterdir() if path.is_file())
            raise DamagedCheckpoint(
                model_dir, f"no safetensors file in it, only {', '.join(others) or 'nothing'}"
            )
        return files
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(
            index, f"wanted a JSON object with a weight_map of tensor to file, got {error!r}"
        ) from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise DamagedCheckpoint(index, f"weight_map names {name!r}, wanted plain file names")
    return [model_dir / name for name in names]
