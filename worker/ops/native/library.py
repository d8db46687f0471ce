"""Finding the native libraries that setting up has built beside this file."""

import ctypes
from pathlib import Path

from worker.parallel_errors import NativeLibraryMissing

_FOLDER = Path(__file__).parent
_REMEDY = "Run `make setup` or `pip install -e .`, which build it (a C++ compiler is needed)."


def open_library(name: str, version_of: str, version: int) -> ctypes.CDLL:
    """The newest build of a library, whose function `version_of` must answer `version`.

    Raises:
        NativeLibraryMissing: it was not built, or is of another version.
    """
    found = sorted(
        (*_FOLDER.glob(f"{name}*.so"), *_FOLDER.glob(f"lib{name}*.so")),
        key=lambda path: path.stat().st_mtime,
    )
    if not found:
        raise NativeLibraryMissing(f"no {name}*.so in {_FOLDER}. {_REMEDY}")
    try:
        native = ctypes.CDLL(str(found[-1]), use_errno=True)
        built = getattr(native, version_of)()
    except (OSError, AttributeError) as error:
        raise NativeLibraryMissing(f"{found[-1]} cannot be loaded: {error}. {_REMEDY}") from error
    if built != version:
        raise NativeLibraryMissing(
            f"{found[-1]} is of version {built}, wanted {version}. {_REMEDY}"
        )
    return native
