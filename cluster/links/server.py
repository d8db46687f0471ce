"""One bound socket, which any number of peers dial."""

import contextlib
import errno
import os
import socket as unix
from collections.abc import Iterator
from pathlib import Path

import zmq
from zmq.utils.monitor import parse_monitor_message

from cluster.errors import AddressError, PeerGone
from cluster.keys import ServerKeys
from cluster.links.addresses import check_address
from cluster.links.sockets import LinkLimits, allow_ipv6, apply_limits, monitor_of

MESSAGES_PER_TURN = 64
"""Most messages taken from one socket before the others, and the plans, have their turn. More:
fewer turns, at the price of steps that wait while a flood of requests is read."""


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
        self._open: set[int] = set()
        """Descriptors of connections that have not ended"""
        self._peer_by_fd: dict[int, bytes] = {}
        self._leaving: list[bytes] = []
        self._socket = context.socket(zmq.ROUTER)
        apply_limits(self._socket, address, limits)
        allow_ipv6(self._socket, address)
        self._socket.router_mandatory = 1
        if keys is not None and address.startswith("tcp://"):
            self._socket.curve_server = 1
            self._socket.curve_secretkey = keys.secret.encode()
            self._socket.zap_domain = domain.encode()
        self._monitor = monitor_of(self._socket, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
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
        self._read_events()
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

    def _read_events(self) -> None:
        """Note which connections have begun and ended, known by their descriptors."""
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            fd = int(event["value"])
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._open.add(fd)
                continue
            self._open.discard(fd)
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
        if fd not in self._open or fd in self._peer_by_fd:
            self._read_events()  # it is new, and may have the descriptor of one that has ended
        self._ended_unheard.discard(fd)
        self._note_end(fd)  # of one that was heard only after this one had its descriptor
        self._known.add(peer)
        if fd in self._open:
            self._peer_by_fd[fd] = peer
        else:
            self._leaving.append(peer)
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
