"""HTTP as bytes on a socket, for what no client library would send."""

import json
import socket
import struct
from dataclasses import dataclass

WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One response, read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    def error(self) -> dict[str, object]:
        error = json.loads(self.body)["error"]
        assert isinstance(error, dict)
        return error


class Raw:
    """One connection. Use as a context manager."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self.socket = socket.create_connection((host.strip("[]"), int(port)), timeout=WAIT_S)
        self._file = self.socket.makefile("rb")

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def send_until_closed(self, data: bytes, most_bytes: int) -> int:
        """Send it again and again; how many bytes were taken before the other end had enough."""
        sent = 0
        try:
            while sent < most_bytes:
                self.socket.sendall(data)
                sent += len(data)
        except (BrokenPipeError, ConnectionResetError):
            pass
        return sent

    def answer(self) -> Answer | None:
        """The next response; None if the connection was closed instead."""
        try:
            first = self._file.readline()
            if not first:
                return None
            headers: dict[str, str] = {}
            while (line := self._file.readline().strip()) != b"":
                name, _, value = line.decode("latin-1").partition(":")
                headers[name.lower()] = value.strip()
            size = int(headers.get("content-length", -1))
            return Answer(int(first.split()[1]), headers, self._file.read(size))
        except ConnectionResetError:
            return None

    def read_until(self, end: bytes) -> bytes:
        """Everything up to these bytes, or to the end of the connection."""
        found = b""
        while end not in found and (byte := self._file.read(1)):
            found += byte
        return found

    def is_closed(self) -> bool:
        """Whether the other end closes, having said nothing more."""
        try:
            return self._file.read(1) == b""
        except ConnectionResetError:
            return True

    def reset(self) -> None:
        """Go without a word: the other end gets a reset instead of an end."""
        linger = struct.pack("ii", 1, 0)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.socket.close()


def head(path: str, *headers: str, method: str = "POST") -> bytes:
    """The request line and headers, with the empty line."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: test", *headers, "", ""]).encode()
