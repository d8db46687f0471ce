"""The only module that knows ZeroMQ: sockets that carry one frame per message.

The engine binds two ROUTER sockets and everybody dials them with a DEALER. Nothing is waited
for without a deadline, every queue is bounded, and what a peer sends can only arrive as bytes.
A peer that leaves is noticed at once; one whose host or link is dead, by ZeroMQ's heartbeats.
On one host (ipc://) there are none: the kernel says when a process ends, and one that is only
stopped for a while (SIGSTOP, a snapshot, a full disk of swap) goes on where it was.
"""

import contextlib
import errno
import hmac
import os
import re
import socket as unix
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from cluster.errors import AddressError, LinkLost, PeerGone
from cluster.keys import ClientKeys, ServerKeys, SocketKeys

IPC_PATH_LIMIT = 107
"""Bytes of a Unix socket's path on Linux (unix(7): sun_path is 108 with its final zero)."""

MESSAGES_PER_TURN = 64
"""Most messages taken from one socket before the others, and the plans, have their turn. More:
fewer turns, at the price of steps that wait while a flood of requests is read."""

ROUTING_OVERHEAD_BYTES = 64

ZAP_ADDRESS = "inproc://zeromq.zap.01"
"""Where libzmq asks whether a peer may come in (ZeroMQ RFC 27)."""


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


def _apply(socket: "zmq.Socket[bytes]", address: str, limits: LinkLimits) -> None:
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = limits.queue_messages
    socket.maxmsgsize = limits.max_message_bytes + ROUTING_OVERHEAD_BYTES
    socket.handshake_ivl = int(limits.handshake_s * 1000)
    if address.startswith("tcp://"):
        socket.heartbeat_ivl = int(limits.heartbeat_s * 1000)
        socket.heartbeat_timeout = int(limits.peer_timeout_s * 1000)
        socket.heartbeat_ttl = int(limits.peer_timeout_s * 1000)


def _allow_ipv6(socket: "zmq.Socket[bytes]", address: str) -> None:
    if "[" in address:
        socket.ipv6 = True


class ServerLink:
    """One bound ROUTER socket. Peers are named by the bytes that ZeroMQ gives them."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        limits: LinkLimits,
        keys: ServerKeys | None = None,
        *,
        domain: str = "",
    ) -> None:
        """Bind at once.

        Args:
            keys: of a tcp:// socket that is encrypted.
            domain: the socket's name where it is asked who may come in.

        Raises:
            AddressError: the address is in use, not ours, or not an address.
        """
        check_address(address)
        self.num_malformed = 0
        """Messages without exactly one frame, or not of today's ZeroMQ."""
        self.num_turned_away = 0
        """Connections that ended without a message: without the keys, not of ZeroMQ, or silent."""
        self._known: set[bytes] = set()
        self._ended_unheard: set[int] = set()
        """Of connections that ended before a message of theirs was read; there may be some."""
        self._peer_by_fd: dict[int, bytes] = {}
        self._leaving: list[bytes] = []
        self._socket = context.socket(zmq.ROUTER)
        _apply(self._socket, address, limits)
        _allow_ipv6(self._socket, address)
        self._socket.router_mandatory = 1
        if keys is not None and address.startswith("tcp://"):
            self._socket.curve_server = 1
            self._socket.curve_secretkey = keys.secret.encode()
            self._socket.zap_domain = domain.encode()
        self._monitor = _monitor_of(self._socket, zmq.EVENT_DISCONNECTED)
        self._file: tuple[Path, int] | None = None
        """Of an ipc:// socket, with its inode: whoever binds the same path later has another."""
        try:
            self.address = self._bind(address)
        except BaseException:
            self.close(linger_s=0.0)
            raise

    def _bind(self, address: str) -> str:
        if address.startswith("ipc://"):
            _refuse_taken_path(Path(address.removeprefix("ipc://")))
        others_may_not = os.umask(0o077)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise AddressError(_why_not_bound(address, error)) from error
        finally:
            os.umask(others_may_not)
        if address.startswith("ipc://"):
            path = Path(address.removeprefix("ipc://"))
            with contextlib.suppress(FileNotFoundError):  # of a name that is no file
                self._file = (path, path.stat().st_ino)
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def receive(self) -> Iterator[tuple[bytes, bytes | None]]:
        """What has arrived, as (peer, frame), without waiting and at most one turn's worth.

        A frame of None says that the peer's connection has ended and that all it sent was
        given before. Peers that never sent anything come and go unnoticed.
        """
        self._read_ends()
        for _ in range(MESSAGES_PER_TURN):
            try:
                name = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            peer, *frames = name.bytes, *self._rest()
            if len(frames) == 1 and (peer in self._known or self._note_peer(peer, name)):
                yield peer, frames[0]
            else:
                self.num_malformed += 1
        else:
            return  # those who left may have sent more
        self.num_turned_away += len(self._ended_unheard)
        self._ended_unheard.clear()
        leaving, self._leaving = self._leaving, []
        for peer in leaving:
            self._known.discard(peer)
            yield peer, None

    def _read_ends(self) -> None:
        """Note whose connections have ended, known by their descriptors."""
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            fd = int(event["value"])
            if fd not in self._peer_by_fd:
                self.num_turned_away += fd in self._ended_unheard  # another one, before
                self._ended_unheard.add(fd)
            self._note_end(fd)

    def _note_peer(self, peer: bytes, name: zmq.Frame) -> bool:
        """Remember whose connection is whose; False for one that we would not see ending.

        That is a peer of ZeroMQ's first protocol, which random bytes can look like.
        """
        try:
            fd = int(name.get(zmq.SRCFD))
        except zmq.ZMQError:
            return False
        self._ended_unheard.discard(fd)
        self._note_end(fd)  # of a connection so short that its end was read before its start
        self._known.add(peer)
        self._peer_by_fd[fd] = peer
        return True

    def _note_end(self, fd: int) -> None:
        peer = self._peer_by_fd.pop(fd, None)
        if peer is not None:
            self._leaving.append(peer)

    def _rest(self) -> list[bytes]:
        return self._socket.recv_multipart(zmq.NOBLOCK)

    def send(self, peer: bytes, frame: bytes) -> None:
        """Queue a frame for a peer, without waiting.

        Raises:
            PeerGone: the peer left, or its queue is full because it does not read.
        """
        try:
            try:
                self._socket.send_multipart((peer, frame), zmq.NOBLOCK)
            except zmq.Again:
                self._socket.get(zmq.EVENTS)  # makes the socket learn what was read meanwhile
                self._socket.send_multipart((peer, frame), zmq.NOBLOCK)
        except zmq.Again:
            raise PeerGone(has_left=False) from None
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            raise PeerGone(has_left=True) from None

    def watch(self, poller: zmq.Poller) -> None:
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)

    def close(self, linger_s: float) -> None:
        """Unbind; what is queued may leave for `linger_s` after the context is closed."""
        if self._socket.closed:
            return
        self._socket.monitor(None, 0)
        self._monitor.close(linger=0)
        self._socket.close(linger=int(linger_s * 1000))
        self._remove_file()

    def _remove_file(self) -> None:
        """libzmq leaves the file of an ipc:// socket where it is; what somebody else has bound
        there meanwhile stays."""
        if self._file is not None:
            path, inode = self._file
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == inode:
                    path.unlink()


class Doorman:
    """Answers libzmq's questions who may come in: on each socket, the holders of one key pair."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", client_by_domain: Mapping[str, str]
    ) -> None:
        self._client_by_domain = client_by_domain
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(ZAP_ADDRESS)

    def answer(self) -> None:
        """Answer all that was asked, without waiting. Source: ZeroMQ RFC 27."""
        while self._socket.poll(0):
            version, request_id, domain, _, _, mechanism, *shown = self._socket.recv_multipart()
            is_let_in = mechanism == b"CURVE" and self._is_known(domain.decode(), shown[0])
            status, text = (b"200", b"OK") if is_let_in else (b"400", b"unknown key")
            self._socket.send_multipart((version, request_id, status, text, b"", b""))

    def _is_known(self, domain: str, key: bytes) -> bool:
        known = self._client_by_domain.get(domain, "")
        return hmac.compare_digest(z85.encode(key), known.encode())

    def watch(self, poller: zmq.Poller) -> None:
        poller.register(self._socket, zmq.POLLIN)

    def close(self) -> None:
        self._socket.close(linger=0)


class EngineLinks:
    """Both sockets of the engine: `front` for clients, `back` for workers and supervisor."""

    def __init__(
        self,
        front_address: str,
        back_address: str,
        *,
        front_limits: LinkLimits,
        back_limits: LinkLimits,
        front_keys: ServerKeys | None = None,
        back_keys: ServerKeys | None = None,
    ) -> None:
        """Bind at once; keys encrypt a tcp:// socket, and hold for no other.

        Raises:
            AddressError: see `ServerLink`.
        """
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._links: list[ServerLink] = []
        keys = {"front": front_keys, "back": back_keys}
        self._doorman = Doorman(self._context, {k: v.client for k, v in keys.items() if v})
        self._doorman.watch(self._poller)
        try:
            self.front = self._open(front_address, front_limits, front_keys, "front")
            self.back = self._open(back_address, back_limits, back_keys, "back")
        except BaseException:
            self.close(linger_s=0.0)
            raise

    def _open(
        self, address: str, limits: LinkLimits, keys: ServerKeys | None, domain: str
    ) -> ServerLink:
        link = ServerLink(self._context, address, limits, keys, domain=domain)
        link.watch(self._poller)
        self._links.append(link)
        return link

    @property
    def num_turned_away(self) -> int:
        """See `ServerLink`; of both sockets."""
        return sum(link.num_turned_away for link in self._links)

    def wake_on(self, fd: int) -> None:
        """Let `wait` return when this descriptor is readable."""
        self._poller.register(fd, zmq.POLLIN)

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until something arrives on either socket, or a peer leaves, or time is up."""
        self._poller.poll(_milliseconds(timeout_s))
        self._doorman.answer()

    def close(self, linger_s: float) -> None:
        """Let queued messages leave for at most `linger_s`, then end all connections."""
        for link in self._links:
            link.close(linger_s)
        self._doorman.close()
        self._context.term()


class DealerLink:
    """A dialled connection, for one thread.

    It reconnects by itself only until it was connected once; then its end is `LinkLost`, so
    that whoever holds it starts anew with a hello.
    """

    def __init__(self, address: str, limits: LinkLimits, keys: ClientKeys | None = None) -> None:
        """Start to dial; the other end need not be there yet.

        Args:
            keys: of a tcp:// socket that is encrypted; no other one is then spoken to.

        Raises:
            AddressError: not an address.
        """
        check_address(address)
        self.address = address
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._has_keys, self._is_tcp = keys is not None, address.startswith("tcp://")
        self._is_connected = False
        self._is_lost = False
        self._why_not = ""
        """What became of the last handshake that failed."""
        _prepare_dealer(self._socket, address, limits, keys)
        self._monitor = _monitor_of(self._socket, _LIFE_EVENTS)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise AddressError(f"cannot dial {address}: {error.strerror}") from error

    def wait_connected(self, timeout_s: float) -> None:
        """Wait until the other end has answered the handshake.

        Raises:
            LinkLost: nobody answered in time, or with keys that do not fit.
        """
        deadline = time.monotonic() + timeout_s
        while not self._is_connected:
            left = deadline - time.monotonic()
            if left <= 0 or self._is_lost:
                raise LinkLost(
                    self._why_not
                    or f"nobody answers at {self.address} within {timeout_s:g} s. Is the engine "
                    "running there?"
                )
            self._monitor.poll(_milliseconds(left))
            self._read_events()

    def send(self, frame: bytes, timeout_s: float = 5.0) -> None:
        """Queue a frame.

        Raises:
            LinkLost: the queue stayed full for `timeout_s`: the other end does not read.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._socket.send(frame, zmq.NOBLOCK)
                return
            except zmq.Again:
                left = deadline - time.monotonic()
                if left <= 0 or self._is_lost:
                    raise LinkLost(
                        f"{self.address} has not taken a message for {timeout_s:g} s"
                    ) from None
            self._socket.poll(_milliseconds(min(left, 0.1)), zmq.POLLOUT)
            self._read_events()

    def offer(self, frame: bytes) -> bool:
        """Queue a frame if it can be done at once; False if the queue is full."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, timeout_s: float | None) -> bytes | None:
        """The next frame, or None when there was none for `timeout_s` (None: for ever).

        Raises:
            LinkLost: the connection ended, and all that came before is read.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            frame = self.take()
            if frame is not None:
                return frame
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            self.wait(left)

    def take(self) -> bytes | None:
        """A frame that is here already, or None.

        Raises:
            LinkLost: the connection ended, and all that came before is read.
        """
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            self._read_events()
        if not self._is_lost:
            return None
        try:  # it may have come between the two looks
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            raise LinkLost(self._why_not or f"the connection to {self.address} ended") from None

    @property
    def why_not(self) -> str:
        """Why the last handshake failed, if it was the last thing that happened; else empty.

        The link may go on trying: the other end may have been about to end.
        """
        return self._why_not

    @property
    def fds(self) -> tuple[int, int]:
        """Descriptors for somebody else's loop. One of them becomes readable when there may be
        something to `take`, or room to `offer` again.

        They tell of changes, not of states: whoever was woken takes until None comes, and looks
        again after sending, which may use up a wake-up. Source: zmq_getsockopt(3), ZMQ_FD.
        """
        return self._socket.fileno(), self._monitor.fileno()

    def wait(self, timeout_s: float | None, fds: Sequence[int] = ()) -> set[int]:
        """Sleep until a frame or an end is here, one of `fds` is readable, or time is up.

        Returns the readable descriptors among `fds`.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        for fd in fds:
            poller.register(fd, zmq.POLLIN)
        ready = dict(poller.poll(_milliseconds(timeout_s)))
        return {fd for fd in fds if fd in ready}

    def _read_events(self) -> None:
        while True:
            try:
                parts = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event = parse_monitor_message(parts)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_connected, self._why_not = True, ""
            elif event == zmq.EVENT_DISCONNECTED:
                self._is_lost = self._is_lost or self._is_connected
            elif event & _FAILED_HANDSHAKES:
                self._note_failed_handshake(event)

    def _note_failed_handshake(self, event: int) -> None:
        """Some failures are final: libzmq does not dial again after them."""
        self._is_lost = event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._why_not = f"{self.address} refuses our key: it lets others in, or was restarted"
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._why_not = (
                f"{self.address} does not encrypt, and was dialled with a key"
                if self._has_keys
                else f"{self.address} is encrypted, and was dialled without a key"
            )
        elif self._is_tcp:
            cause = (
                "an engine does whose key is another than the one that it was dialled with"
                if self._has_keys
                else "an encrypted one does when it is dialled without a key"
            )
            self._why_not = f"{self.address} hangs up in the handshake, as {cause}"

    @property
    def is_closed(self) -> bool:
        return bool(self._socket.closed)

    def close(self, linger_s: float = 0.0) -> None:
        """End the connection; what is queued may leave for `linger_s`. May be called twice."""
        if self._socket.closed:
            return
        self._socket.monitor(None, 0)
        self._monitor.close(linger=0)
        self._socket.close(linger=int(linger_s * 1000))
        self._context.term()

    def __enter__(self) -> "DealerLink":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


_LIFE_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED_HANDSHAKES


def _monitor_of(socket: "zmq.Socket[bytes]", events: int) -> "zmq.Socket[bytes]":
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


def _prepare_dealer(
    socket: "zmq.Socket[bytes]", address: str, limits: LinkLimits, keys: ClientKeys | None
) -> None:
    """Set a DEALER's bounds and, for an encrypted engine, its keys."""
    _apply(socket, address, limits)
    _allow_ipv6(socket, address)
    socket.reconnect_ivl = 50
    socket.reconnect_ivl_max = 200  # a restarted engine is found soon
    if keys is not None and address.startswith("tcp://"):
        socket.curve_serverkey = keys.server.encode()
        socket.curve_publickey = keys.public.encode()
        socket.curve_secretkey = keys.secret.encode()


def _milliseconds(timeout_s: float | None) -> int | None:
    """For `poll`: rounded up, so that a wait for a deadline does not spin before it."""
    return None if timeout_s is None else max(0, int(timeout_s * 1000 + 0.999))


def _refuse_taken_path(path: Path) -> None:
    """A socket that somebody listens on must not be replaced silently, as bind would do."""
    if path.is_socket() and _somebody_listens(path):
        raise AddressError(
            f"ipc://{path} is in use by another process. Choose another path or end that process"
        )
    if not path.parent.is_dir():
        raise AddressError(f"the directory of the socket ipc://{path} does not exist")


def _somebody_listens(path: Path) -> bool:
    with unix.socket(unix.AF_UNIX, unix.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0


def _why_not_bound(address: str, error: zmq.ZMQError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"{address} is in use by another process. Choose another port, or port 0 to be "
            "given a free one"
        )
    if error.errno in (errno.ENODEV, errno.EADDRNOTAVAIL):
        return f"{address} is not an address of this machine"
    return f"cannot listen at {address}: {error.strerror}"
