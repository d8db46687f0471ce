"""Finding our C++ libraries: what is wrong with one is said, with the command that builds it."""

from pathlib import Path

import pytest

from worker.ops.native import library, team
from worker.ops.native.library import open_library
from worker.parallel_errors import NativeLibraryMissing
from worker.shared_memory import VERSION, load_native

LIBRARIES = [
    ("shared_reduce", "stoker_shared_version", VERSION),
    ("kernels", "stoker_kernels_version", team.VERSION),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    return tmp_path


@pytest.mark.parametrize(("name", "version_of", "version"), LIBRARIES)
def test_a_library_that_was_built_is_opened(name: str, version_of: str, version: int) -> None:
    assert getattr(open_library(name, version_of, version), version_of)() == version


def test_a_library_that_was_not_built_is_missed_with_the_command_that_builds_it(
    folder: Path,
) -> None:
    with pytest.raises(NativeLibraryMissing, match=r"`make setup` or `pip install -e \.`"):
        load_native()


def test_a_damaged_library_is_named_with_the_command_that_builds_it(folder: Path) -> None:
    (folder / "shared_reduce.cpython-311.so").write_bytes(b"no ELF")

    with pytest.raises(NativeLibraryMissing, match=r"shared_reduce.*cannot be loaded.*make setup"):
        load_native()


def test_another_library_under_the_same_name_is_refused() -> None:
    with pytest.raises(NativeLibraryMissing, match=r"cannot be loaded.*no_such_function"):
        open_library("kernels", "no_such_function", 1)


@pytest.mark.parametrize(("name", "version_of", "version"), LIBRARIES)
def test_a_library_of_another_version_is_refused(name: str, version_of: str, version: int) -> None:
    with pytest.raises(NativeLibraryMissing, match=f"is of version {version}, wanted 99"):
        open_library(name, version_of, 99)
