"""What all sockets have in common: bounds, keys, and how the ends of connections are told."""

from dataclasses import dataclass

import zmq

from cluster.keys import ClientKeys, ServerKeys, SocketKeys

ROUTING_OVERHEAD_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """Bounds of one socket."""

    max_message_bytes: int = 16 << 20
    """A peer that sends more in one message is cut off by ZeroMQ before it is stored."""

    queue_messages: int = 1000
    """Messages that may wait per peer and direction. More: slower readers are borne longer,
    at the price of memory."""

    heartbeat_s: float = 2.0
    """How often an idle tcp:// connection is tried. Less: dead hosts are noticed sooner."""

    peer_timeout_s: float = 10.0
    """Silence after which a tcp:// connection counts as dead."""

    handshake_s: float = 10.0
    """A connection that has not said by then who it is, is ended."""


def fresh_keys() -> SocketKeys:
    """New random keys for both ends of one socket."""
    server_public, server_secret = (key.decode() for key in zmq.curve_keypair())
    public, secret = (key.decode() for key in zmq.curve_keypair())
    return SocketKeys(
        server=ServerKeys(secret=server_secret, client=public),
        client=ClientKeys(server=server_public, public=public, secret=secret),
    )


def apply_limits(socket: "zmq.Socket[bytes]", address: str, limits: LinkLimits) -> None:
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = limits.queue_messages
    socket.maxmsgsize = limits.max_message_bytes + ROUTING_OVERHEAD_BYTES
    socket.handshake_ivl = int(limits.handshake_s * 1000)
    if address.startswith("tcp://"):
        socket.heartbeat_ivl = int(limits.heartbeat_s * 1000)
        socket.heartbeat_timeout = int(limits.peer_timeout_s * 1000)
        socket.heartbeat_ttl = int(limits.peer_timeout_s * 1000)


def allow_ipv6(socket: "zmq.Socket[bytes]", address: str) -> None:
    if "[" in address:
        socket.ipv6 = True


def monitor_of(socket: "zmq.Socket[bytes]", events: int) -> "zmq.Socket[bytes]":
    """What tells of a socket's handshakes and ended connections, however many at once.

    With a bound on what waits here, libzmq's I/O thread would stop in the middle of a flood of
    connections until somebody reads.
    """
    address = f"inproc://monitor-{socket.fileno()}"
    socket.monitor(address, events)
    monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    monitor.linger = monitor.rcvhwm = 0
    monitor.connect(address)
    return monitor


def milliseconds(timeout_s: float | None) -> int | None:
    """For `poll`: rounded up, so that a wait for a deadline does not spin before it."""
    return None if timeout_s is None else max(0, int(timeout_s * 1000 + 0.999))
