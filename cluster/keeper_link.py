"""A rank's connection to what keeps weights on its host (`cluster.weight_keeper`)."""

import hashlib
import os
import socket
import struct
from pathlib import Path

import msgspec
from msgspec import Struct

from cluster.doctor.model_facts import model_facts, weight_files

MAP, FILL, FILLED, KEPT = b"map", b"fill", b"filled", b"kept"
"""What is said: `MAP` and `FILLED` bring the memory's descriptor."""

MOST_ASK_BYTES = 4096

ANSWER_S = 10.0
"""For the keeper to say that it has taken what was filled."""

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid: struct ucred of unix(7)


class Ask(Struct, frozen=True):
    """The first message of a rank."""

    key: str
    """The engine's secret."""
    part: str
    version: str


class KeeperLink:
    """`worker.kept_weights.WeightKeeper` for one rank, which borrows once.

    A keeper that is gone, or a stranger in its place, costs the rank nothing but reading.
    """

    def __init__(self, name: str, key: str, model_dir: Path) -> None:
        self._name, self._key, self._model_dir = name, key, model_dir
        self._model = ""
        self._link: socket.socket | None = None

    def borrow(self, part: str, form: str) -> int | None:
        assert self._link is None, "a rank borrows once"
        self._model = model_identity(self._model_dir)
        if not self._model:
            return None
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            link.connect(abstract(self._name))
            if not runs_as_us(link):
                raise ConnectionRefusedError("another user's process keeps weights there")
            ask = Ask(key=self._key, part=part, version=f"{self._model} {form}")
            link.send(msgspec.json.encode(ask))
            # However long it takes: who fills it has the time of its group's start, and with the
            # connection of a filler that is gone goes its turn.
            said, fds, _, _ = socket.recv_fds(link, len(MAP) + 1, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            link.close()
            return None
        if said in (MAP, FILL):
            self._link = link
        else:
            link.close()
        return fds[0] if fds else None

    def lend(self, fd: int) -> bool:
        if self._link is None:
            return False
        if model_identity(self._model_dir) != self._model:  # files changed while they were read
            self.close()
            return False
        try:
            socket.send_fds(self._link, [FILLED], [fd])
            self._link.settimeout(ANSWER_S)
            is_kept = self._link.recv(len(KEPT) + 1) == KEPT
        except OSError:
            is_kept = False
        if not is_kept:
            self.close()
        return is_kept

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


def model_identity(model_dir: Path) -> str:
    """Differs if a file of the model has been changed or replaced, whatever it holds; empty: the
    model is not whole."""
    facts = model_facts(model_dir)
    if not facts.digest:
        return ""
    digest = hashlib.blake2b(facts.digest.encode(), digest_size=16)
    for file in weight_files(model_dir):
        found = file.stat()
        digest.update(
            f"{found.st_dev} {found.st_ino} {found.st_size} "
            f"{found.st_mtime_ns} {found.st_ctime_ns} ".encode()
        )
    return digest.hexdigest()


def abstract(name: str) -> bytes:
    """The address of a socket without a file."""
    return b"\0" + name.encode()


def runs_as_us(link: socket.socket) -> bool:
    """Whether the process at the other end runs as our user: abstract names have no owner."""
    raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.geteuid())
