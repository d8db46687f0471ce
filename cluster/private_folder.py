"""A folder for sockets that only its owner may enter, short enough for their paths."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from cluster.errors import AddressError
from cluster.links.addresses import IPC_PATH_LIMIT

PREFIX = "stoker-"

_LOCK = "lock"
_LONGEST_NAME = "/stoker-xxxxxxxx/front"
_SHORT_PARENT = Path("/tmp")


class PrivateFolder:
    """Made with mode 0700, and locked while its owner lives, so that others can tell."""

    def __init__(self, parent: str = "") -> None:
        """Make it under `parent`, by default the temporary folder, and sweep what the dead left.

        Raises:
            AddressError: a socket's path in `parent` would be too long, or it does not exist.
        """
        where = Path(parent or tempfile.gettempdir())
        if not parent and not _is_short(where):
            where = _SHORT_PARENT
        if not _is_short(where):
            raise AddressError(
                f"socket_dir={where} is too long: the paths of sockets in it would be over "
                f"{IPC_PATH_LIMIT} bytes. Use a shorter folder"
            )
        try:
            sweep(where)
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=where))
            self._lock = _locked(self.path)
        except OSError as error:
            raise AddressError(f"cannot make a folder for sockets in {where}: {error}") from error

    def address(self, name: str) -> str:
        return f"ipc://{self.path}/{name}"

    def remove(self) -> None:
        """May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _locked(folder: Path) -> int:
    """A lock file that has its name only when it is locked, lest a sweep come between."""
    unnamed = folder / f"new-{_LOCK}"
    lock = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    unnamed.rename(folder / _LOCK)
    return lock


def sweep(parent: Path) -> None:
    """Remove our folders whose owners are gone: those that nobody holds locked."""
    for path in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _is_short(parent: Path) -> bool:
    return len(os.fsencode(parent)) + len(_LONGEST_NAME) <= IPC_PATH_LIMIT
