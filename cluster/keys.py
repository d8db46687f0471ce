"""The keys of encrypted sockets: who holds which, and the file that brings them to clients.

Each tcp:// socket of the engine has two key pairs of its own (CURVE, ZeroMQ RFC 26), made at
every start. By the engine's pair, those who dial know it; by the clients' pair, which all of
them share, it knows them. Whoever lacks either is turned away in the handshake.
"""

import contextlib
import os
import re
import tempfile
from pathlib import Path

import msgspec
from msgspec import Struct

from cluster.errors import KeyFileError

_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
"""32 bytes as text (ZeroMQ RFC 32)."""

_HEADING = """\
# Stoker's key file: whoever can read it can use the cluster. Copy it to where clients run.
"""


class ServerKeys(Struct, frozen=True, kw_only=True):
    """What the engine's end of a socket holds."""

    secret: str
    """Of its own pair."""
    client: str
    """Public key of the only pair that it lets in."""

    def __repr__(self) -> str:
        return f"ServerKeys(client={self.client!r})"


class ClientKeys(Struct, frozen=True, kw_only=True):
    """What whoever dials a socket holds."""

    server: str
    """The engine's public key."""
    public: str
    secret: str

    def __repr__(self) -> str:
        return f"ClientKeys(server={self.server!r}, public={self.public!r})"


class SocketKeys(Struct, frozen=True, kw_only=True):
    """Both ends of one socket."""

    server: ServerKeys
    client: ClientKeys


def write_key_file(path: Path, keys: ClientKeys) -> None:
    """Make or replace the file, for its owner alone, in one go.

    Raises:
        KeyFileError: it cannot be written, or is there already and is not a key file.
    """
    if path.exists():
        read_key_file(path)
    lines = [f'{name} = "{value}"\n' for name, value in msgspec.structs.asdict(keys).items()]
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # mode 0600
        with os.fdopen(handle, "w") as file:
            file.writelines([_HEADING, *lines])
        Path(name).rename(path)
    except OSError as error:
        raise KeyFileError(f"cannot write the key file {path}: {error.strerror}") from error


def read_key_file(path: Path) -> ClientKeys:
    """Raises KeyFileError: it is not there, cannot be read, or does not hold keys."""
    try:
        keys = msgspec.toml.decode(path.read_bytes(), type=ClientKeys)
    except OSError as error:
        raise KeyFileError(
            f"cannot read the key file {path}: {error.strerror}. `stoker serve` writes it where "
            "key_file says, or else where it prints; it is a new one at every start"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise KeyFileError(f"{path} is not a key file of Stoker: {error}") from error
    for name, value in msgspec.structs.asdict(keys).items():
        if not _Z85.fullmatch(value):
            raise KeyFileError(
                f"the key file {path} is damaged: {name} must have 40 characters of Z85, and has "
                f"{len(value)}"
            )
    return keys


def remove_key_file(path: Path, keys: ClientKeys) -> None:
    """Remove the file, unless another cluster has written its own there meanwhile."""
    with contextlib.suppress(KeyFileError, OSError):
        if read_key_file(path) == keys:
            path.unlink()
