"""A dialled connection, as clients, workers and the supervisor have it."""

import time
from collections.abc import Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from cluster.errors import AddressError, LinkLost
from cluster.keys import ClientKeys
from cluster.links.addresses import check_address
from cluster.links.sockets import LinkLimits, allow_ipv6, apply_limits, milliseconds, monitor_of

_FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_LIFE_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED_HANDSHAKES


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
        self._monitor = monitor_of(self._socket, _LIFE_EVENTS)
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
            self._monitor.poll(milliseconds(left))
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
            self._socket.poll(milliseconds(min(left, 0.1)), zmq.POLLOUT)
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
        ready = dict(poller.poll(milliseconds(timeout_s)))
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


def _prepare_dealer(
    socket: "zmq.Socket[bytes]", address: str, limits: LinkLimits, keys: ClientKeys | None
) -> None:
    """Set a DEALER's bounds and, for an encrypted engine, its keys."""
    apply_limits(socket, address, limits)
    allow_ipv6(socket, address)
    socket.reconnect_ivl = 50
    socket.reconnect_ivl_max = 200  # a restarted engine is found soon
    if keys is not None and address.startswith("tcp://"):
        socket.curve_serverkey = keys.server.encode()
        socket.curve_publickey = keys.public.encode()
        socket.curve_secretkey = keys.secret.encode()
