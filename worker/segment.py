"""How the ranks of one host come to share a piece of memory, and notice when one is gone.

The memory has no name: rank 0 makes it once all ranks have come and passes it to them over a
socket whose own name (Linux's abstract kind, `unix(7)`) is not a file either. So there is
nothing in /dev/shm or anywhere else that a killed process could leave behind, and the small
/dev/shm of a container is no limit. The sockets stay open: a process that ends, however it
ends, closes its own.
"""

import fcntl
import os
import select
import socket
import struct
import time
from contextlib import closing, suppress

from worker.parallel_errors import MeetingFailed

_HELLO = struct.Struct("<8sIIIQ")  # magic, version, rank, size, bytes of memory
_MAGIC = b"stoker-s"
_ANSWER = struct.Struct("<H")  # length of a refusal; 0 comes with the memory
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid: struct ucred of unix(7)
_LONGEST_NAME = 107  # sun_path of unix(7), less the zero that makes it abstract
_RETRY_S = 0.01
_HELLO_TIMEOUT_S = 5.0


class Segment:
    """Zeroed memory behind `fd`, and a socket to rank 0, or on rank 0 to every other rank."""

    def __init__(self, fd: int, links: dict[int, socket.socket]) -> None:
        self.fd = fd
        self._links = links
        self._poll = select.poll()
        self._rank_by_fd: dict[int, int] = {}
        for rank, link in links.items():
            link.setblocking(False)
            self._poll.register(link, select.POLLIN)
            self._rank_by_fd[link.fileno()] = rank

    def gone(self) -> tuple[int, ...]:
        """Linked ranks that have closed their side or ended. Nobody sends anything else."""
        return tuple(self._rank_by_fd[fd] for fd, _ in self._poll.poll(0))

    def close(self) -> None:
        """Give the memory back and show the others that this rank is gone. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        for link in self._links.values():
            link.close()


def share_segment(
    meeting: str, *, rank: int, size: int, num_bytes: int, version: int, timeout_s: float
) -> Segment:
    """Meet the other ranks under the name `meeting` and share `num_bytes` with them.

    The name must be this group's alone on this host, and new each time the group starts.

    Raises:
        MeetingFailed: a rank did not come in time, or was started with other numbers, or
            there is not enough memory.
    """
    if not 0 < len(meeting.encode()) <= _LONGEST_NAME:
        raise ValueError(
            f"a meeting point's name has 1 to {_LONGEST_NAME} bytes, got {len(meeting.encode())}"
        )
    deadline = time.monotonic() + timeout_s
    hello = _HELLO.pack(_MAGIC, version, rank, size, num_bytes)
    if rank == 0:
        return _host_segment(meeting, hello, deadline, timeout_s)
    return _join_segment(meeting, hello, deadline, timeout_s)


def _host_segment(meeting: str, hello: bytes, deadline: float, timeout_s: float) -> Segment:
    _, _, _, size, num_bytes = _HELLO.unpack(hello)
    links: dict[int, socket.socket] = {}
    try:
        with _listen(meeting, size) as listener:
            while len(links) < size - 1:
                missing = sorted(set(range(1, size)) - links.keys())
                link = _accept(listener, deadline)
                if link is None:
                    raise MeetingFailed(
                        f"rank 0 waited {timeout_s:g} s at {meeting!r}, but of {size} ranks "
                        f"these did not come: {missing}. Look for why they ended, or raise the "
                        "time limit of the start."
                    )
                if (theirs := _read_hello(link, hello, missing)) is not None:
                    links[theirs] = link
        fd = _make_memory(meeting, num_bytes)
        try:
            for link in links.values():
                socket.send_fds(link, [_ANSWER.pack(0)], [fd])
        except OSError as error:
            os.close(fd)
            raise MeetingFailed(f"a rank left {meeting!r} during the start: {error}") from error
    except BaseException:
        for link in links.values():
            link.close()
        raise
    return Segment(fd, links)


def _listen(meeting: str, size: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(_address(meeting))
    except OSError as error:
        listener.close()
        raise MeetingFailed(
            f"rank 0 cannot listen at {meeting!r}: {error.strerror}. The name must be new for "
            "each start of a group; is another rank 0 of the same group running?"
        ) from error
    listener.listen(size)
    return listener


def _accept(listener: socket.socket, deadline: float) -> socket.socket | None:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        return None
    listener.settimeout(left_s)
    try:
        link, _ = listener.accept()
    except TimeoutError:
        return None
    link.settimeout(min(left_s, _HELLO_TIMEOUT_S))
    return link


def _read_hello(link: socket.socket, hello: bytes, missing: list[int]) -> int | None:
    """The rank at the other end; None, and closed, for one that is none of ours.

    Raises:
        MeetingFailed: it is one of ours, but does not fit; it was told the same.
    """
    try:
        theirs = link.recv(_HELLO.size + 1)
    except OSError:
        theirs = b""
    if len(theirs) != _HELLO.size or not theirs.startswith(_MAGIC) or not _is_own(link):
        link.close()
        return None
    _, version, rank, size, num_bytes = _HELLO.unpack(theirs)
    _, own_version, _, own_size, own_bytes = _HELLO.unpack(hello)
    refusal = ""
    if (version, size, num_bytes) != (own_version, own_size, own_bytes):
        refusal = (
            f"rank {rank} was started for {size} ranks and {num_bytes} bytes (version {version}), "
            f"but rank 0 for {own_size} ranks and {own_bytes} bytes (version {own_version}); "
            "start all ranks of a group from the same installation with the same settings"
        )
    elif rank not in missing:
        refusal = f"rank {rank} came twice, or is not among the {own_size} ranks of this group"
    if not refusal:
        return int(rank)
    with closing(link), suppress(OSError):
        text = refusal.encode()
        link.send(_ANSWER.pack(len(text)) + text)
    raise MeetingFailed(refusal)


def _join_segment(meeting: str, hello: bytes, deadline: float, timeout_s: float) -> Segment:
    rank = _HELLO.unpack(hello)[2]
    link = _connect(meeting, rank, deadline, timeout_s)
    try:
        link.send(hello)
        link.settimeout(max(deadline - time.monotonic(), _RETRY_S))
        answer, fds, _, _ = socket.recv_fds(link, 4096, 1)
        if not fds:
            why = answer[_ANSWER.size :].decode() or "it closed the connection"
            raise MeetingFailed(f"rank {rank} was turned away at {meeting!r} by rank 0: {why}")
    except (OSError, MeetingFailed) as error:
        link.close()
        if isinstance(error, MeetingFailed):
            raise
        raise MeetingFailed(
            f"rank {rank} reached rank 0 at {meeting!r} but got no memory within "
            f"{timeout_s:g} s ({error}): rank 0 still waits for another rank, or has ended"
        ) from error
    return Segment(fds[0], {0: link})


def _connect(meeting: str, rank: int, deadline: float, timeout_s: float) -> socket.socket:
    while True:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            link.connect(_address(meeting))
        except OSError as error:
            link.close()
            if time.monotonic() > deadline:
                raise MeetingFailed(
                    f"rank {rank} looked {timeout_s:g} s for rank 0 at {meeting!r}: "
                    f"{error.strerror}. Both must run on the same host, in the same network "
                    "namespace; look for why rank 0 ended, or raise the time limit of the start."
                ) from error
            time.sleep(_RETRY_S)
            continue
        if _is_own(link):
            return link
        link.close()
        raise MeetingFailed(f"{meeting!r} belongs to another user of this host; choose a new name")


def _address(meeting: str) -> bytes:
    return b"\0" + meeting.encode()


def _is_own(link: socket.socket) -> bool:
    """Whether the process at the other end runs as our user: abstract names have no owner."""
    raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.geteuid())


def _make_memory(meeting: str, num_bytes: int) -> int:
    """Memory that is really there: pages promised but missing would end a rank by SIGBUS."""
    fd = -1
    try:
        fd = os.memfd_create(meeting, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(fd, 0, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise MeetingFailed(
            f"wanted {num_bytes} bytes of memory to share between the ranks at {meeting!r}, but "
            f"the system refused: {error.strerror}. Free some memory, or raise the limit of this "
            "container or process (file size, memory)."
        ) from error
    return fd
