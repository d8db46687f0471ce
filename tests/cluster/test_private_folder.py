"""The folder of sockets: private, short, and swept when its owner is dead."""

import stat
from pathlib import Path

import pytest

from cluster.errors import AddressError
from cluster.links.addresses import check_address
from cluster.private_folder import PrivateFolder, sweep


def test_only_the_owner_may_enter(tmp_path: Path) -> None:
    folder = PrivateFolder(str(tmp_path))
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    folder.remove()
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_takes_what_the_dead_left_and_nothing_else(tmp_path: Path) -> None:
    living = PrivateFolder(str(tmp_path))
    dead = tmp_path / "stoker-dead"
    dead.mkdir()
    (dead / "lock").touch()
    being_made = tmp_path / "stoker-new"
    being_made.mkdir()

    sweep(tmp_path)

    assert sorted(tmp_path.iterdir()) == sorted([living.path, being_made])
    living.remove()


def test_a_temporary_folder_with_a_long_path_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    folder = PrivateFolder()
    check_address(folder.address("front"))
    folder.remove()


def test_a_long_path_that_was_asked_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AddressError, match=r"socket_dir=.* is too long"):
        PrivateFolder(str(tmp_path / ("x" * 100)))


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(AddressError, match=r"cannot make a folder .*/no"):
        PrivateFolder(str(tmp_path / "no"))
