"""Which clusters run on this machine for this user: one small file each, gone when they end.

The folder belongs to the user alone, so that nobody else can send `stoker status` elsewhere;
it goes with the last file.
A file whose process is gone was left by a kill; whoever sees it removes it.
"""

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCluster:
    """What is known of a cluster without asking it."""

    address: str
    model: str
    pid: int
    key_file: str = ""
    """What clients need, if it encrypts."""
    http_address: str = ""
    """Of its HTTP routes, if it serves any."""


def folder_of_user() -> Path:
    return Path(tempfile.gettempdir()) / f"stoker-{os.getuid()}"


@contextmanager
def announced(
    address: str,
    model: str,
    folder: Path | None = None,
    *,
    key_file: str = "",
    http_address: str = "",
) -> Iterator[None]:
    """Let others of this user find a cluster that lives as long as the block."""
    place = folder_of_user() if folder is None else folder
    cluster = RunningCluster(
        address=address,
        model=model,
        pid=os.getpid(),
        key_file=key_file,
        http_address=http_address,
    )
    place.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(place):
        yield  # somebody else's folder: better not found than found wrong
        return
    handle, name = tempfile.mkstemp(prefix="cluster-", suffix=".json", dir=place)
    path = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.encode(cluster))
        yield
    finally:
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others' files are in it
            place.rmdir()


def running_clusters(folder: Path | None = None) -> list[RunningCluster]:
    """The clusters that run for this user, oldest first."""
    place = folder_of_user() if folder is None else folder
    if not _is_private(place):
        return []
    found: list[RunningCluster] = []
    for path in sorted(place.glob("cluster-*.json"), key=_age):
        try:
            cluster = msgspec.json.decode(path.read_bytes(), type=RunningCluster)
        except (OSError, msgspec.MsgspecError):
            continue  # gone meanwhile, or only half written
        if _is_alive(cluster.pid):
            found.append(cluster)
        else:
            path.unlink(missing_ok=True)
    return found


def key_file_for(address: str, given: str | os.PathLike[str] | None = None) -> str:
    """The key file to dial an address with: the given one, that of the user's own cluster there,
    or the environment's. Empty: none is known, or none is needed."""
    if given is not None:
        return os.fspath(given)
    if not address.startswith("tcp://"):
        return ""
    from cluster.config import key_file_from_environment

    own = {cluster.address: cluster.key_file for cluster in running_clusters()}
    return own[address] if address in own else key_file_from_environment()


def _is_private(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return False
    is_mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return is_mine and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
