"""The TCP socket of HTTP: bound once, before anything is started, and shared by the servers."""

import errno
import ipaddress
import socket

from cluster.errors import AddressError

BACKLOG = 2048
"""Connections that may wait to be accepted; the kernel's own limit may be lower."""

SILENCE_S = 120
"""A caller that takes nothing for this long, or whose host is gone, is cut off."""

UNSENT_BYTES = 128 << 10
"""What the kernel keeps for a reader that does not take it (it counts double, for its own
records). More: memory per reader that has stopped, which is noticed later."""

_OF_CONNECTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.SOL_SOCKET, socket.SO_SNDBUF, UNSENT_BYTES),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_S // 8),
)
"""Connections inherit them from the socket that accepts them (socket(7), tcp(7))."""


class Listener:
    """A listening socket, and how others call it."""

    def __init__(self, host: str, port: int) -> None:
        """Listen at once, so that nobody else can be given the port.

        Args:
            host: a name or an address of this machine; "" or "0.0.0.0" is all of IPv4, "::" all.
            port: 0 is any free one.

        Raises:
            AddressError: the port is in use, or the host is not ours.
        """
        try:
            family, _, _, _, address = _first_address(host, port)
            self.socket = socket.create_server(
                address[:2],
                family=family,
                backlog=BACKLOG,
                dualstack_ipv6=address[0] == "::" and socket.has_dualstack_ipv6(),
            )
        except OSError as error:
            raise AddressError(_why_not(host, port, error)) from error
        for level, option, value in _OF_CONNECTIONS:
            self.socket.setsockopt(level, option, value)
        bound, self.port = self.socket.getsockname()[:2]
        self.url = (
            f"http://[{bound}]:{self.port}" if ":" in bound else f"http://{bound}:{self.port}"
        )
        self.is_loopback = ipaddress.ip_address(bound).is_loopback
        """Whether only this machine can reach it."""

    def close(self) -> None:
        """End our own copy; may be called twice."""
        self.socket.close()


def _first_address(host: str, port: int) -> tuple[int, int, int, str, tuple[str, int]]:
    """IPv4 first: `localhost` is often both, and more callers try 127.0.0.1."""
    found = socket.getaddrinfo(
        host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, kind, protocol, name, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, kind, protocol, name, (str(address[0]), int(address[1]))


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {host} is in use by another process. Choose another with --port, or "
            "--port 0 to be given a free one"
        )
    if isinstance(error, socket.gaierror) or error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return f"host={host} is not an address of this machine ({error.strerror})"
    return f"cannot listen at port {port} of {host}: {error.strerror}"
