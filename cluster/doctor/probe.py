"""What one node does for an examination: tells its facts, listens, and tries to reach others.

It runs wherever somebody can call its methods by name with bytes: in a Ray actor, or in a
process of a test. Each call is bounded in time.
"""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
from msgspec import Struct

from cluster.doctor.collect import Question, collect_host
from cluster.doctor.scene import Pair, Path

NUM_ECHOES = 5
MOST_AT_ONCE = 16

ECHO_S = 20.0
"""After this long an echo ends, whoever still speaks to it."""


class Target(Struct, frozen=True, kw_only=True):
    """An address of another node to be reached."""

    node: str
    host: str
    port: int


class Errand(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Go to each target, and see how long a round trip takes."""

    node: str
    targets: tuple[Target, ...]
    timeout_s: float


class Reached(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One target, and how far its clock is ahead of ours."""

    path: Path
    clock_ahead_s: float = 0.0
    clock_error_s: float = 0.0


class Meeting(Struct, frozen=True, kw_only=True):
    """Be one of two ranks that meet at rank 0's host and port."""

    nodes: tuple[str, str]
    rank: int
    host: str
    port: int
    timeout_s: float


class Echo:
    """Listens at one address and answers each byte with this host's time."""

    def __init__(self, host: str, port: int = 0) -> None:
        self._listener = socket.create_server((host, port), family=_family(host))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        self._listener.settimeout(ECHO_S)
        with contextlib.suppress(OSError):
            while True:
                link, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(link,), daemon=True).start()

    @staticmethod
    def _answer(link: socket.socket) -> None:
        link.settimeout(ECHO_S)
        with contextlib.suppress(OSError), link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while link.recv(1):
                link.sendall(f"{time.time():032.9f}".encode())

    def close(self) -> None:
        # Of a socket that somebody waits at, only this ends the waiting.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class NodeProbe:
    """One node's side of an examination."""

    def __init__(self) -> None:
        self._echoes: list[Echo] = []
        self._meeting: socket.socket | None = None

    def facts(self, question: bytes) -> bytes:
        """`Question` to `Host`. Meanwhile the libraries for a meeting are loaded."""
        threading.Thread(target=_load_libraries, daemon=True).start()
        return msgspec.json.encode(collect_host(msgspec.json.decode(question, type=Question)))

    def listen(self, host: bytes) -> bytes:
        """Open an echo at an address of this node; its port."""
        echo = Echo(host.decode())
        self._echoes.append(echo)
        return str(echo.port).encode()

    def reach(self, errand: bytes) -> bytes:
        """`Errand` to one `Reached` for each target."""
        asked = msgspec.json.decode(errand, type=Errand)
        with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
            found = pool.map(
                lambda target: reach(asked.node, target, asked.timeout_s), asked.targets
            )
            return msgspec.json.encode(list(found))

    def open_meeting(self, host: bytes) -> bytes:
        """Listen for the other rank; the port."""
        self._close_meeting()
        self._meeting = socket.create_server((host.decode(), 0), family=_family(host.decode()))
        return str(self._meeting.getsockname()[1]).encode()

    def meet(self, meeting: bytes) -> bytes:
        """`Meeting` to `Pair`."""
        asked = msgspec.json.decode(meeting, type=Meeting)
        listener, self._meeting = self._meeting, None
        return msgspec.json.encode(meet(asked, listener))

    def close(self, _: bytes) -> bytes:
        self._close_meeting()
        for echo in self._echoes:
            echo.close()
        return b""

    def _close_meeting(self) -> None:
        if self._meeting is not None:
            self._meeting.close()
            self._meeting = None


METHODS: tuple[str, ...] = ("facts", "listen", "reach", "open_meeting", "meet", "close")


def reach(source: str, target: Target, timeout_s: float) -> Reached:
    """Connect to a target's echo, and measure the best of some round trips."""
    path = Path(source=source, target=target.node, address=f"{target.host}:{target.port}")
    try:
        best = _best_echo(target, timeout_s)
    except TimeoutError:
        return Reached(path=msgspec.structs.replace(path, problem=f"no answer in {timeout_s:g} s"))
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        return Reached(path=msgspec.structs.replace(path, problem=why.lower()))
    rtt_s, ahead_s = best
    return Reached(
        path=msgspec.structs.replace(path, rtt_s=rtt_s),
        clock_ahead_s=ahead_s,
        clock_error_s=rtt_s / 2,
    )


def _best_echo(target: Target, timeout_s: float) -> tuple[float, float]:
    """(seconds of the quickest round trip, seconds by which the other clock is ahead)"""
    deadline = time.monotonic() + timeout_s
    tries = []
    with socket.create_connection((target.host, target.port), timeout_s) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(NUM_ECHOES):
            link.settimeout(max(0.01, deadline - time.monotonic()))
            asked = time.time()
            link.sendall(b"?")
            told = float(_exactly(link, 32))
            rtt_s = time.time() - asked
            tries.append((rtt_s, told - (asked + rtt_s / 2)))
    return min(tries)


def _exactly(link: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = link.recv(count - len(data))
        if not more:
            raise ConnectionResetError("the connection was closed")
        data += more
    return data


def meet(meeting: Meeting, listener: socket.socket | None) -> Pair:
    """Be a rank, and say what sums cost or why there were none."""
    try:
        from worker.link_probe import measure_link

        figures = measure_link(
            meeting.host,
            meeting.port,
            rank=meeting.rank,
            listener=listener,
            timeout_s=meeting.timeout_s,
        )
    except Exception as error:  # also of an installation that is broken: it is a finding
        return Pair(nodes=meeting.nodes, problem=f"{type(error).__name__}: {error}")
    return Pair(nodes=meeting.nodes, latency_s=figures.latency_s, bytes_per_s=figures.bytes_per_s)


def _load_libraries() -> None:
    with contextlib.suppress(Exception):  # whoever meets will say it
        import worker.link_probe  # noqa: F401


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
