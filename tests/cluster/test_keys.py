"""Key files: private, whole, and never in place of something else."""

import stat
from pathlib import Path

import msgspec
import pytest

from cluster.errors import KeyFileError
from cluster.keys import ClientKeys, read_key_file, remove_key_file, write_key_file
from cluster.links.sockets import fresh_keys


def test_a_key_file_is_its_owners_alone_and_reads_as_it_was_written(tmp_path: Path) -> None:
    path, keys = tmp_path / "key", fresh_keys().client
    write_key_file(path, keys)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_key_file(path) == keys
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_start_replaces_the_file_and_the_old_ones_end_leaves_it(tmp_path: Path) -> None:
    path, old, new = tmp_path / "key", fresh_keys().client, fresh_keys().client
    write_key_file(path, old)
    write_key_file(path, new)
    remove_key_file(path, old)
    assert read_key_file(path) == new
    remove_key_file(path, new)
    remove_key_file(path, new)
    assert not path.exists()


def test_another_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "diary"
    path.write_text("dear diary")
    with pytest.raises(KeyFileError, match="diary is not a key file"):
        write_key_file(path, fresh_keys().client)
    assert path.read_text() == "dear diary"


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=f"cannot write the key file {tmp_path}/no/key: No such"):
        write_key_file(tmp_path / "no" / "key", fresh_keys().client)
    with pytest.raises(KeyFileError, match=f"cannot read the key file {tmp_path}/no/key: No such"):
        read_key_file(tmp_path / "no" / "key")


@pytest.mark.parametrize("field", ["server", "public", "secret"])
@pytest.mark.parametrize("value", ["", "x" * 39, "x" * 41, "x" * 39 + "'", "ü" * 40])
def test_a_damaged_key_is_named_and_not_shown(tmp_path: Path, field: str, value: str) -> None:
    path = tmp_path / "key"
    keys = msgspec.structs.replace(fresh_keys().client, **{field: value})
    write_key_file(path, keys)
    with pytest.raises(KeyFileError, match=f"key is damaged: {field}") as caught:
        read_key_file(path)
    assert keys.secret not in str(caught.value) or not keys.secret


@pytest.mark.parametrize("data", [b"", b"server = 1", b"\xff\xfe", b"server = 'x'\npublic = 'y'"])
def test_what_is_no_key_file_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(data)
    with pytest.raises(KeyFileError, match="is not a key file"):
        read_key_file(path)


def test_keys_differ_at_every_start_and_for_each_socket_and_end() -> None:
    keys = [fresh_keys() for _ in range(3)]
    texts = [text for each in keys for end in (each.server, each.client) for text in _texts(end)]
    assert len(set(texts)) == 4 * 3  # the clients' public key is on both ends


def _texts(end: object) -> tuple[str, ...]:
    return tuple(msgspec.structs.asdict(end).values())  # type: ignore[arg-type]


def test_keys_are_not_in_what_a_log_would_show_of_them() -> None:
    keys = fresh_keys()
    assert keys.client.secret not in repr(keys)
    assert keys.server.secret not in f"{keys.server} {keys.client!r}"
    assert isinstance(keys.client, ClientKeys)
