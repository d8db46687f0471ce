"""Many streams read over raw sockets, of which some are not read for a while."""

import json
import selectors
import socket
import time
from collections.abc import Iterable
from functools import cache

from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from cluster.frontend.tokenizer_files import TokenizerFiles
from tests.cluster.frontend.tiny_tokenizers import llama3_like, make_files

WAIT_S = 60.0
WIDE = "wide" * 500
"""A token of 2,000 characters, with which few tokens fill a socket."""


@cache
def wide_files() -> TokenizerFiles:
    raw = RawTokenizer.from_buffer(llama3_like().tokenizer_json)
    raw.add_tokens([AddedToken(WIDE, special=False)])
    return make_files(raw, bos_token="<|begin|>", eos_token="<|im_end|>")


class Reading:
    """One streamed completion on a socket of its own."""

    def __init__(self, url: str, *, receive_buffer: int = 0, **fields: object) -> None:
        """
        Args:
            receive_buffer: bytes that the kernel takes for a reader who does not; 0: as usual.
        """
        body = json.dumps({"prompt": "hi", "stream": True, "temperature": 0, **fields}).encode()
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(WAIT_S)
        self.socket.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        self.socket.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        self.data = b""
        self.has_ended = False
        """Whether the other end closed the connection, in order or not."""

    def take(self) -> None:
        """Read what is there; waits if there is nothing."""
        try:
            part = self.socket.recv(1 << 20)
        except ConnectionResetError:
            part = b""
        self.has_ended = not part
        self.data += part

    def take_all(self) -> None:
        """Read until the answer or the connection ends."""
        while not self.is_complete and not self.has_ended:
            self.take()

    @property
    def is_complete(self) -> bool:
        return self.data.endswith(b"\r\n0\r\n\r\n")

    @property
    def body(self) -> bytes:
        """What has come of the answer's body, out of its HTTP chunks (RFC 9112, 7.1)."""
        _, _, rest = self.data.partition(b"\r\n\r\n")
        parts: list[bytes] = []
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            parts.append(rest[: int(size, 16)])
            assert rest[len(parts[-1]) :][:2] in (b"", b"\r\n"), rest[len(parts[-1]) :][:80]
            rest = rest[len(parts[-1]) + 2 :]
        return b"".join(parts)

    @property
    def events(self) -> list[str]:
        """The data of each event."""
        events = self.body.decode().split("\n\n")
        assert events.pop() == ""
        assert all(event.startswith("data: ") for event in events), events
        return [event.removeprefix("data: ") for event in events]

    @property
    def text(self) -> str:
        chunks = [json.loads(event) for event in self.events if event != "[DONE]"]
        return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])

    def close(self) -> None:
        self.socket.close()


def take_until_each_has(readings: Iterable[Reading], count: int, mark: bytes) -> None:
    """Read all of them as they come, until a mark was seen so many times in each."""
    with selectors.DefaultSelector() as selector:
        waiting = 0
        for reading in readings:
            if reading.data.count(mark) < count:
                selector.register(reading.socket, selectors.EVENT_READ, reading)
                waiting += 1
        limit = time.monotonic() + WAIT_S
        while waiting:
            for key, _ in selector.select(WAIT_S):
                key.data.take()
                assert not key.data.has_ended, f"the connection ended after {key.data.data!r}"
                if key.data.data.count(mark) >= count:
                    selector.unregister(key.fileobj)
                    waiting -= 1
            assert time.monotonic() < limit, f"{waiting} streams have not got what they should"
