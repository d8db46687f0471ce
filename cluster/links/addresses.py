"""What addresses of sockets may look like, and whom they reach."""

import os
import re

from cluster.errors import AddressError

IPC_PATH_LIMIT = 107
"""Bytes of a Unix socket's path on Linux (unix(7): sun_path is 108 with its final zero)."""


def check_address(address: str) -> None:
    """Refuse what cannot be bound or dialled.

    Raises:
        AddressError: neither ipc:// nor tcp://, a path too long for a Unix socket, or a TCP
            address without a port.
    """
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest:
        size = len(os.fsencode(rest))
        if size > IPC_PATH_LIMIT:
            raise AddressError(
                f"the socket path {rest} has {size} bytes; Unix sockets allow {IPC_PATH_LIMIT}. "
                "Use a shorter directory (socket_dir) or a tcp:// address"
            )
    elif scheme == "tcp":
        host, _, port = rest.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise AddressError(f"a TCP address looks like tcp://HOST:PORT, got {address}")
    else:
        hint = "; HTTP is for curl and OpenAI's clients" if scheme.startswith("http") else ""
        raise AddressError(f"an address starts with ipc:// or tcp://, got {address!r}{hint}")


def is_wildcard(address: str) -> bool:
    """Whether a TCP address means every network of the machine."""
    return re.match(r"tcp://(0\.0\.0\.0|\*|\[?::\]?):", address) is not None


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches a TCP address, as far as its text tells."""
    return re.match(r"tcp://(127\.[0-9.]+|localhost|\[::1\]):", address) is not None
