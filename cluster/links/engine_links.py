"""The engine's two sockets, and who may come in."""

import hmac
from collections.abc import Mapping

import zmq
from zmq.utils import z85

from cluster.keys import ServerKeys
from cluster.links.server import ServerLink
from cluster.links.sockets import LinkLimits, milliseconds

ZAP_ADDRESS = "inproc://zeromq.zap.01"
"""Where libzmq asks whether a peer may come in (ZeroMQ RFC 27)."""


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
        self._poller.poll(milliseconds(timeout_s))
        self._doorman.answer()

    def close(self, linger_s: float) -> None:
        """Let queued messages leave for at most `linger_s`, then end all connections."""
        for link in self._links:
            link.close(linger_s)
        self._doorman.close()
        self._context.term()
