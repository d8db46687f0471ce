"""Keeps the packed weights of a host's ranks for those that come after them, in a thread.

Ranks come to a socket whose name is not a file (Linux's abstract kind, `unix(7)`), say which
weights they want, and get them as a descriptor of sealed memory, or are told to fill it. They
keep the connection while they use it. What is kept goes with this process, however it ends.
"""

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Iterable

import msgspec

from cluster.keeper_link import (
    FILL,
    FILLED,
    KEPT,
    MAP,
    MOST_ASK_BYTES,
    Ask,
    abstract,
    runs_as_us,
)
from cluster.logs import EventLog
from cluster.wakeup import WakePipe
from cluster.weight_copies import CopyName, Drop, Give, Instruction, LetFill, WeightCopies
from worker.kept_weights import is_sealed

BACKLOG = 128
"""Ranks that may come at the same moment."""


class WeightKeeper:
    """Of one host and one cluster: only its ranks, which know its key, are served."""

    def __init__(self, key: str, log: EventLog) -> None:
        """Listen; ranks are served from now on.

        Raises:
            OSError: the system has no such sockets.
        """
        self.name = f"stoker-weights-{secrets.token_hex(8)}"
        """Where ranks come to."""
        self._key, self._log = key, log
        self._copies = WeightCopies()
        self._fds: dict[CopyName, int] = {}
        self._links: dict[int, socket.socket] = {}
        """By descriptor."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(abstract(self.name))
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        self._wake = WakePipe()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Keep nothing any more. What ranks have mapped stays theirs. Idempotent."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        self._wake.wake()
        self._thread.join()
        os.close(self._wake.fd)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            selector.register(self._wake.fd, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._is_closing.is_set():
                for key, _ in selector.select():
                    if key.fd in self._links:
                        self._read(key.fd)
                    elif key.fd == self._listener.fileno():
                        self._accept()
        for link in self._links.values():
            link.close()
        self._listener.close()
        for fd in self._fds.values():
            os.close(fd)

    def _accept(self) -> None:
        try:
            link, _ = self._listener.accept()
        except OSError:  # it has gone already, or there are no descriptors left for it
            return
        if not runs_as_us(link):
            link.close()
            return
        link.setblocking(False)
        self._links[link.fileno()] = link
        self._selector.register(link, selectors.EVENT_READ)

    def _read(self, peer: int) -> None:
        """What a rank says, or that it is gone. One that says anything else is sent away."""
        try:
            said, fds, _, _ = socket.recv_fds(
                self._links[peer], MOST_ASK_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            said, fds = b"", []
        if self._copies.is_filling(peer) and said == FILLED and fds and is_sealed(fds[0]):
            self._keep(peer, fds.pop())
        elif said and not self._copies.has_asked(peer) and (name := self._asked(said)):
            self._follow(self._copies.ask(peer, name))
        else:
            self._send_away(peer)
        for fd in fds:
            os.close(fd)

    def _asked(self, said: bytes) -> CopyName | None:
        """None: it does not know the key."""
        try:
            ask = msgspec.json.decode(said, type=Ask)
        except msgspec.DecodeError:
            return None
        if not hmac.compare_digest(ask.key.encode(), self._key.encode()):
            return None
        return CopyName(ask.part, ask.version)

    def _keep(self, peer: int, fd: int) -> None:
        name, then = self._copies.filled(peer)
        self._fds[name] = fd
        self._log.info("weights_kept", part=name.part, bytes=os.fstat(fd).st_size)
        self._tell(peer, KEPT)
        self._follow(then)

    def _send_away(self, peer: int) -> None:
        link = self._links.pop(peer)
        self._selector.unregister(link)
        link.close()
        self._follow(self._copies.gone(peer))

    def _follow(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Give(peer=peer, name=name):
                    self._tell(peer, MAP, self._fds[name])
                case LetFill(peer=peer):
                    self._tell(peer, FILL)
                case Drop(name=name):
                    os.close(self._fds.pop(name))
                    self._log.info("weights_dropped", part=name.part)

    def _tell(self, peer: int, message: bytes, *fds: int) -> None:
        """Each rank is told little, so its socket has room; if it is gone, reading says so."""
        with contextlib.suppress(OSError):
            socket.send_fds(self._links[peer], [message], fds)
