"""Who is connected to the front socket, and how each is spoken to.

A client that has left, or that does not read what it is sent, is cut off: it is forgotten at
once and its requests with it, so that it costs nobody anything. ZeroMQ cannot close one
connection of a ROUTER, so a slow client is told when it reads again.
"""

from cluster.errors import PeerGone
from cluster.links.server import ServerLink
from cluster.logs import EventLog
from cluster.messages.clients import Refusal
from cluster.messages.sockets import ToClient
from cluster.wire import TO_CLIENT

FAREWELL_EVERY_S = 1.0
FAREWELL_FOR_S = 60.0
"""How often, and for how long, a client that was cut off is tried with the news."""

MAX_LABEL = 64
"""Letters of a client's label that the log shows."""


class Clients:
    """Connections that have said hello, by number: small integers, never used again."""

    def __init__(self, link: ServerLink, log: EventLog) -> None:
        self._link = link
        self._log = log
        self._number_by_peer: dict[bytes, int] = {}
        self._peer_by_number: dict[int, bytes] = {}
        self._farewell_until: dict[bytes, float] = {}
        self._next_farewell = 0.0
        self._last_number = 0
        self.num_cut = 0
        """Clients that were cut off, because they vanished or read too slowly."""

    def __len__(self) -> int:
        return len(self._number_by_peer)

    @property
    def numbers(self) -> list[int]:
        return list(self._peer_by_number)

    def number_of(self, peer: bytes) -> int | None:
        """None: the peer has not said hello, or was cut off since."""
        return self._number_by_peer.get(peer)

    def greet(self, peer: bytes, label: str) -> int:
        """A hello: the peer's number, the same as before if it said hello already."""
        self._farewell_until.pop(peer, None)
        number = self._number_by_peer.get(peer)
        if number is None:
            self._last_number += 1
            number = self._last_number
            self._number_by_peer[peer] = number
            self._peer_by_number[number] = peer
            self._log.info("client_came", client=number, label=label[:MAX_LABEL])
        return number

    def left(self, peer: bytes) -> int | None:
        """A connection ended; the number that it had, if any."""
        self._farewell_until.pop(peer, None)
        number = self._number_by_peer.pop(peer, None)
        if number is not None:
            del self._peer_by_number[number]
            self._log.info("client_left", client=number)
        return number

    def send(self, number: int, message: ToClient, now: float) -> bool:
        """Queue a message; False if the client is not there any more, or was cut off now."""
        peer = self._peer_by_number.get(number)
        if peer is None:
            return False
        try:
            self._link.send(peer, TO_CLIENT.encode(message))
        except PeerGone as error:
            self._cut(number, peer, error, now)
            return False
        return True

    def answer(self, peer: bytes, message: ToClient) -> None:
        """Answer somebody who may be a stranger, if it can be done at once."""
        self.answer_frame(peer, TO_CLIENT.encode(message))

    def answer_frame(self, peer: bytes, frame: bytes) -> None:
        try:
            self._link.send(peer, frame)
        except PeerGone as error:
            self._log.debug("answer_lost", error=error)

    def _cut(self, number: int, peer: bytes, why: PeerGone, now: float) -> None:
        del self._number_by_peer[peer], self._peer_by_number[number]
        self._farewell_until[peer] = now + FAREWELL_FOR_S
        self._next_farewell = now + FAREWELL_EVERY_S
        self.num_cut += 1
        tell = self._log.info if why.has_left else self._log.warning
        tell("client_cut_off", client=number, reason=why)

    @property
    def next_deadline(self) -> float | None:
        """When `say_farewell` should be called next."""
        return self._next_farewell if self._farewell_until else None

    def say_farewell(self, now: float) -> None:
        """Try to tell those who were cut off; they can hear it once they read again."""
        if not self._farewell_until or now < self._next_farewell:
            return
        self._next_farewell = now + FAREWELL_EVERY_S
        news = TO_CLIENT.encode(
            Refusal(
                reason="too_slow",
                message="this client did not read what it was sent until its queue was full "
                "(client_queue), so its requests were aborted. Connect anew",
            )
        )
        for peer, until in list(self._farewell_until.items()):
            try:
                self._link.send(peer, news)
            except PeerGone:
                if now < until:
                    continue
            del self._farewell_until[peer]
