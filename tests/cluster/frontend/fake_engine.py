"""An engine without a model, on a real socket: it answers by a script, or as a test tells it."""

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from cluster.errors import PeerGone, WireError
from cluster.frontend.tokenizer import Tokenizer
from cluster.frontend.tokenizer_files import TokenizerFiles
from cluster.keys import ServerKeys
from cluster.links.engine_links import EngineLinks
from cluster.links.sockets import LinkLimits
from cluster.messages.clients import ClientHello, GenerationDefaults, ServerInfo, TokenizerRequest
from cluster.messages.reports import EngineMetrics, MetricsRequest, Sample, Status, StatusRequest
from cluster.messages.sockets import FromClient, ToClient
from cluster.wire import FROM_CLIENT, PROTOCOL_VERSION, TO_CLIENT
from scheduler.arrays import int32
from scheduler.request import Ended, Finish, Request, Started, TokenBatch
from tests.cluster.frontend.tiny_tokenizers import llama3_like

Script = Callable[[Request], Iterable[ToClient]]

ANSWER = " the quick brown fox jumps over the lazy dog"


def make_info(files: TokenizerFiles | None = None, **fields: object) -> ServerInfo:
    files = llama3_like() if files is None else files
    values: dict[str, object] = {
        "protocol": PROTOCOL_VERSION,
        "engine_id": "fake",
        "model": "tiny",
        "max_model_len": 64,
        "vocab_size": 512,
        "block_size": 16,
        "max_num_seqs": 8,
        "end_ids": (Tokenizer(files).eos_token_id or 0,),
        "tokenizer_digest": files.digest,
        "defaults": GenerationDefaults(),
    }
    return ServerInfo(**(values | fields))  # type: ignore[arg-type]


def tokens(
    handle: int, token_ids: Iterable[int] = (), finish: Finish = Finish.NOT_YET, **fields: object
) -> TokenBatch:
    """News of one request."""
    ids = list(token_ids)
    return TokenBatch(
        handle=int32([handle]),
        count=int32([len(ids)]),
        token=int32(ids),
        finish=bytes_column([int(finish)]),
        **fields,  # type: ignore[arg-type]
    )


def bytes_column(values: Iterable[int]):  # type: ignore[no-untyped-def]
    import numpy as np

    return np.asarray(list(values), dtype=np.uint8)


def answer_at_once(request: Request) -> list[ToClient]:
    """One batch for each token of `ANSWER` that is not there yet, then an end by length."""
    ids = Tokenizer(llama3_like()).encode(ANSWER, add_special_tokens=False)
    ids = ids[len(request.output) : request.sampling.max_tokens]
    handle = request.handle
    first = tokens(handle, ids[:1], started=(Started(handle=handle, num_cached_tokens=2),))
    others = [tokens(handle, [token_id]) for token_id in ids[1:]]
    end = tokens(handle, [], Finish.LENGTH, ended=(Ended(handle=handle, num_preemptions=1),))
    return [first, *others, end]


def say_nothing(_: Request) -> list[ToClient]:
    return []


class FakeEngine:
    """Serves one front socket from a thread until closed.

    `received` has all messages but hellos; `script` says what a request is answered.
    """

    def __init__(
        self,
        address: str,
        *,
        script: Script = say_nothing,
        info: ServerInfo | None = None,
        hello_answer: ToClient | None = None,
        files: TokenizerFiles | None = None,
        keys: ServerKeys | None = None,
    ) -> None:
        self.files = llama3_like() if files is None else files
        self.info = make_info(self.files) if info is None else info
        self.hello_answer: ToClient = self.info if hello_answer is None else hello_answer
        self.script = script
        self.status = Status(engine_id="fake", model="tiny", state="serving", uptime_s=1.0)
        self.metrics = EngineMetrics(
            model="tiny", values={"engine_up": (Sample((), 1.0),)}, distributions={}
        )
        self.received: queue.SimpleQueue[FromClient] = queue.SimpleQueue()
        self.answers_status = True
        self.num_hellos = self.num_status_requests = 0
        self._peers: list[bytes] = []
        self._todo: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        limits = LinkLimits()
        back = (
            f"ipc://{address.removeprefix('ipc://')}.back"
            if "ipc" in address
            else "tcp://127.0.0.1:0"
        )
        self._links = EngineLinks(
            address, back, front_limits=limits, back_limits=limits, front_keys=keys
        )
        self.address = self._links.front.address
        self._links.wake_on(self._wake_fd)
        self._thread = threading.Thread(target=self._run, name="fake-engine")
        self._thread.start()

    def send(self, message: ToClient) -> None:
        """Send to every client that said hello."""
        self.send_bytes(TO_CLIENT.encode(message))

    def send_bytes(self, frame: bytes) -> None:
        self._todo.put(frame)
        os.eventfd_write(self._wake_fd, 1)

    def next_request(self) -> Request:
        """The next message, which must be a request."""
        message = self.received.get(timeout=10)
        assert isinstance(message, Request), message
        return message

    def close(self) -> None:
        if self._thread.is_alive():
            self._todo.put(None)
            os.eventfd_write(self._wake_fd, 1)
            self._thread.join(10)
            os.close(self._wake_fd)

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while self._turn():
                self._links.wait(None)
        finally:
            self._links.close(linger_s=0.0)

    def _turn(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        for peer, frame in self._links.front.receive():
            if frame is None:
                self._peers = [other for other in self._peers if other != peer]
            else:
                self._take(peer, frame)
        while not self._todo.empty():
            order = self._todo.get()
            if order is None:
                return False
            for peer in self._peers:
                self._send(peer, order)
        return True

    def _take(self, peer: bytes, frame: bytes) -> None:
        try:
            message = FROM_CLIENT.decode(frame)
        except WireError:
            return
        if isinstance(message, ClientHello):
            self.num_hellos += 1
            self._peers.append(peer)
            self._send(peer, TO_CLIENT.encode(self.hello_answer))
            return
        if isinstance(message, TokenizerRequest):
            self._send(peer, TO_CLIENT.encode(self.files))
            return
        if isinstance(message, StatusRequest):
            self.num_status_requests += 1
            if self.answers_status:
                self._send(peer, TO_CLIENT.encode(self.status))
            return
        if isinstance(message, MetricsRequest):
            self._send(peer, TO_CLIENT.encode(self.metrics))
            return
        self.received.put(message)
        if isinstance(message, Request):
            for answer in self.script(message):
                self._send(peer, TO_CLIENT.encode(answer))

    def _send(self, peer: bytes, frame: bytes) -> None:
        try:
            self._links.front.send(peer, frame)
        except PeerGone:
            self._peers = [other for other in self._peers if other != peer]


def ipc_address(folder: Path, name: str = "front") -> str:
    return f"ipc://{folder / name}"
