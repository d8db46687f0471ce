"""An engine without a model: every live request gets one more token of a text at each step.

Speaks to clients on a real front socket as the engine does, one `TokenBatch` per client and
step, and never waits for them: whoever does not take its batch is cut off.
"""

import argparse
import itertools
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from cluster.errors import PeerGone
from cluster.frontend.tokenizer import Tokenizer
from cluster.frontend.tokenizer_files import TokenizerFiles
from cluster.links.engine_links import EngineLinks
from cluster.links.sockets import LinkLimits
from cluster.messages.clients import ClientHello, ServerInfo, TokenizerRequest
from cluster.messages.reports import GroupStatus, Status, StatusRequest
from cluster.messages.sockets import FromClient, ToClient
from cluster.wire import FROM_CLIENT, PROTOCOL_VERSION, TO_CLIENT
from scheduler.arrays import int32
from scheduler.request import Abort, Finish, Request, Started, TokenBatch

TEXT = (
    "A stoker keeps the engine fed: he watches the fire, the water and the road ahead, and "
    "throws coal where it burns best. Nobody sees him, and without him nothing moves. "
)
"""What all requests are answered, over and over, each from another place of it."""

STATUS = Status(
    engine_id="scripted",
    model="scripted",
    state="serving",
    uptime_s=0.0,
    groups=(GroupStatus(group=0, epoch=1, state="ready"),),
)


@dataclass(slots=True)
class Peer:
    """One client and its live requests, as columns would be too much for a script."""

    left_by_handle: dict[int, int] = field(default_factory=dict)
    """Tokens still to come."""
    new: list[int] = field(default_factory=list)
    """Handles without a token yet."""


class ScriptedEngine:
    """One thread: take in messages, and at each step send every client its batch."""

    def __init__(self, address: str, files: TokenizerFiles, *, queue_messages: int = 1000) -> None:
        self.num_steps = self.num_tokens = self.num_aborted = self.num_cut = 0
        self.longest_step_s = 0.0
        self._files = files
        tokenizer = Tokenizer(files)
        self._ids = int32(tokenizer.encode(TEXT, add_special_tokens=False))
        self._info = ServerInfo(
            protocol=PROTOCOL_VERSION,
            engine_id="scripted",
            model="scripted",
            max_model_len=1 << 20,
            vocab_size=tokenizer.vocab_size,
            block_size=16,
            max_num_seqs=4096,
            tokenizer_digest=files.digest,
        )
        limits = LinkLimits(queue_messages=queue_messages)
        self._links = EngineLinks(
            address, f"{address}.back", front_limits=limits, back_limits=limits
        )
        self._peers: dict[bytes, Peer] = {}

    @property
    def num_live(self) -> int:
        return sum(len(peer.left_by_handle) for peer in self._peers.values())

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until a message is there, then take in what has come."""
        self._links.wait(timeout_s)
        for name, frame in self._links.front.receive():
            if frame is None:
                self._peers.pop(name, None)
            else:
                self._take(name, FROM_CLIENT.decode(frame))

    def step(self) -> None:
        """One more token for everybody."""
        began = time.perf_counter()
        for name, peer in list(self._peers.items()):
            if peer.left_by_handle:
                self._send(name, self._batch(peer))
        self.num_steps += 1
        self.longest_step_s = max(self.longest_step_s, time.perf_counter() - began)

    def close(self) -> None:
        self._links.close(linger_s=0.0)

    def _take(self, name: bytes, message: FromClient) -> None:
        match message:
            case ClientHello():
                self._peers[name] = Peer()
                self._send(name, self._info)
            case TokenizerRequest():
                self._send(name, self._files)
            case StatusRequest():
                self._send(name, STATUS)
            case Request(handle=handle) if name in self._peers:
                assert message.sampling.max_tokens is not None
                self._peers[name].left_by_handle[handle] = message.sampling.max_tokens
                self._peers[name].new.append(handle)
            case Abort(handle=handles) if name in self._peers:
                left = self._peers[name].left_by_handle
                gone = [left.pop(handle, None) for handle in handles.tolist()]
                self.num_aborted += sum(each is not None for each in gone)

    def _batch(self, peer: Peer) -> TokenBatch:
        left = peer.left_by_handle
        handles = int32(list(left))
        places = (handles * 7 + self.num_steps) % len(self._ids)
        finish = np.zeros(len(handles), dtype=np.uint8)
        for row, (handle, count) in enumerate(list(left.items())):
            if count == 1:
                del left[handle]
                finish[row] = Finish.LENGTH
            else:
                left[handle] = count - 1
        new, peer.new = peer.new, []
        self.num_tokens += len(handles)
        return TokenBatch(
            handle=handles,
            token=self._ids[places],
            finish=finish if finish.any() else finish[:0],
            started=tuple(Started(handle=handle) for handle in new),
        )

    def _send(self, name: bytes, message: ToClient) -> None:
        try:
            self._links.front.send(name, TO_CLIENT.encode(message))
        except PeerGone:
            self.num_cut += self._peers.pop(name, None) is not None


def steps_at(rate: float) -> Iterable[float]:
    """When each step is due, in seconds from the first."""
    return (number / rate for number in itertools.count())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="ipc:// address of the front socket")
    parser.add_argument("--tokenizer", type=Path, required=True, help="directory of a model")
    parser.add_argument("--rate", type=float, required=True, help="steps per second")
    parser.add_argument("--gather", type=int, default=1, help="requests to wait for at first")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    engine = ScriptedEngine(args.address, Tokenizer.from_directory(args.tokenizer).files)
    print("listening", flush=True)
    try:
        while True:
            while engine.num_live < args.gather:
                engine.wait(None)
            start = time.perf_counter()
            for due in steps_at(args.rate):
                while (left := start + due - time.perf_counter()) > 0:
                    engine.wait(left)
                engine.step()
                if not engine.num_live:
                    break
    finally:
        engine.close()
        print(
            f"steps {engine.num_steps} tokens {engine.num_tokens} aborted {engine.num_aborted} "
            f"cut {engine.num_cut} longest {engine.longest_step_s * 1e3:.1f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
