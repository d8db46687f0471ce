"""One connection to an engine for many threads: requests in, their growing state out.

One thread of its own owns the socket; callers hand it messages and wait on conditions. All
of the protocol is in `FrontSession`, guarded by `lock`. When the connection breaks, the thread
dials again, and requests go on with the engine that answers, if one does within `recovery_s`;
else they fail with `EngineLost`.
"""

import contextlib
import itertools
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random, SystemRandom
from typing import TypeVar

from cluster.errors import AddressError, KeyFileError, LinkLost, WireError
from cluster.frontend.draft import (
    Draft,
    Prompt,
    RequestOptions,
    default_sampling,
    draft_of,
)
from cluster.frontend.errors import (
    ClientClosed,
    EngineLost,
    EngineUnreachable,
    ProtocolMismatch,
    WaitTimedOut,
    unreachable,
)
from cluster.frontend.requests import LiveRequest, Watcher
from cluster.frontend.session import BadMessage, FrontSession, Question, Ticket
from cluster.frontend.tokenizer import Tokenizer
from cluster.keys import read_key_file
from cluster.links.addresses import check_address
from cluster.links.dealer import DealerLink
from cluster.links.sockets import LinkLimits
from cluster.logs import EventLog
from cluster.messages.changes import (
    ClusterUpgraded,
    DrainNode,
    ModelReloaded,
    NodeDrained,
    ReloadModel,
    Scaled,
    ScaleGroups,
    UpgradeCluster,
)
from cluster.messages.clients import GenerationDefaults, ServerInfo
from cluster.messages.reports import Status, StatusRequest
from cluster.messages.sockets import FromClient, ToClient
from cluster.wire import FROM_CLIENT, PROTOCOL_VERSION, TO_CLIENT
from scheduler.errors import InvalidRequest
from scheduler.request import TokenBatch
from scheduler.sampling import MAX_N, MAX_SEED, SamplingParams

Reply = TypeVar("Reply", Status, Scaled, NodeDrained, ModelReloaded, ClusterUpgraded)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Where the engine is, and how long a client waits for what."""

    address: str
    """Of the engine's front socket: tcp://host:port or ipc://path."""
    label: str = ""
    """For the engine's log."""
    connect_timeout_s: float = 10.0
    """Longest wait for an engine that can take requests, also after a loss."""
    reply_timeout_s: float = 30.0
    """Longest wait for the tokenizer's files or a status."""
    close_timeout_s: float = 2.0
    """Longest wait for the last messages to leave."""
    shortest_redial_s: float = 0.05
    longest_redial_s: float = 1.0
    """Pauses between attempts to connect; each is twice the one before."""
    recovery_s: float = 60.0
    """How long requests of a lost connection wait for another engine, which goes on behind the
    tokens that are here. 0: they fail at once."""
    key_file: str = ""
    """Of an encrypted engine; read whenever it is dialled, since a new start has new keys."""

    def dial(self) -> DealerLink:
        """A new connection.

        Raises:
            KeyFileError: the key file cannot be read now.
            AddressError: the address cannot be dialled.
        """
        is_encrypted = self.key_file and self.address.startswith("tcp://")
        keys = read_key_file(Path(self.key_file)) if is_encrypted else None
        return DealerLink(self.address, LinkLimits(max_message_bytes=TO_CLIENT.max_bytes), keys)


_LONGEST_LOOK_S = 1.0


def seeds_from(seed: int | None) -> Callable[[], int]:
    """Draws seeds for requests that have none: the same ones for the same `seed`, or, for
    None, nobody knows which."""
    chance = SystemRandom() if seed is None else Random(seed)
    return lambda: chance.randrange(MAX_SEED - MAX_N)


class EngineClient:
    """Submits requests to one engine and keeps their state. Any thread may call anything.

    Args:
        is_over: whether no engine will come any more, asked about once a second while requests
            wait for one.
    Raises:
        AddressError: the address is not one that can be dialled.
    """

    def __init__(
        self,
        config: ClientConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw_seed: Callable[[], int] | None = None,
        is_over: Callable[[], bool] | None = None,
    ) -> None:
        check_address(config.address)
        self.config = config
        self._is_over = is_over
        self.lock = threading.RLock()
        """Held by whoever reads a `LiveRequest` that is not done."""
        self._changed = threading.Condition(self.lock)
        self._log = EventLog("client", address=config.address)
        self._clock = clock
        self._draw_seed = seeds_from(None) if draw_seed is None else draw_seed
        self._session = FrontSession(PROTOCOL_VERSION, config.label, config.recovery_s)
        self._outbox: deque[bytes] = deque()
        self._numbers = itertools.count()
        self._dead: Exception | None = None  # why nothing will ever work again
        self._last_loss = ""
        self._is_closing = threading.Event()
        self._linger_s = 0.0
        self._tokenizer: tuple[str, Tokenizer] | None = None  # with its digest
        self._tokenizer_lock = threading.Lock()
        self._defaults: tuple[GenerationDefaults, SamplingParams] | None = None
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(
            target=self._run, name=f"stoker-client {config.address}", daemon=True
        )
        self._thread.start()

    # What the engine is

    def info(self, timeout_s: float | None = None) -> ServerInfo:
        """What the engine serves, once it is ready.

        Raises:
            EngineUnreachable: none was ready within `timeout_s` (default: the config's).
            ProtocolMismatch, ClientClosed
        """
        limit_s = self.config.connect_timeout_s if timeout_s is None else timeout_s
        with self.lock:
            self._wait(lambda: self._session.info is not None, limit_s, self._unreachable)
            assert self._session.info is not None
            return self._session.info

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the engine's model, brought over once; None if it has none."""
        digest = self.info().tokenizer_digest
        if not digest:
            return None
        with self._tokenizer_lock:
            if self._tokenizer is None or self._tokenizer[0] != digest:
                self._tokenizer = (digest, self._fetch_tokenizer(digest))
            return self._tokenizer[1]

    def default_sampling(self) -> SamplingParams:
        """What holds where a caller gives no sampling parameters."""
        given = self.info().defaults
        with self.lock:
            if self._defaults is None or self._defaults[0] != given:
                self._defaults = (given, default_sampling(given))
            return self._defaults[1]

    def status(self, timeout_s: float | None = None) -> Status:
        """How the engine is, also while it starts.

        Raises:
            EngineUnreachable: no answer within `timeout_s`.
            EngineLost: the connection broke meanwhile.
        """
        return self._ask(StatusRequest(), Status, timeout_s)

    def scale(self, num_groups: int | None, timeout_s: float | None = None) -> Scaled:
        """Ask for another number of groups; None: for as many as load needs.

        Raises:
            EngineUnreachable, EngineLost: as for `status`.
        """
        return self._ask(ScaleGroups(num_groups), Scaled, timeout_s)

    def drain(
        self, node: str, *, undo: bool = False, timeout_s: float | None = None
    ) -> NodeDrained:
        """Ask that no worker group be on a node, or, to `undo` it, that groups may start there.

        Raises:
            EngineUnreachable, EngineLost: as for `status`.
        """
        return self._ask(DrainNode(node, undo), NodeDrained, timeout_s)

    def reload(
        self, model: str = "", *, only_asks: bool = False, timeout_s: float | None = None
    ) -> ModelReloaded:
        """Ask that one group after the other come back with the weights of `model`; or, with
        `only_asks`, how far that is.

        Raises:
            EngineUnreachable, EngineLost: as for `status`.
        """
        return self._ask(ReloadModel(model=model, only_asks=only_asks), ModelReloaded, timeout_s)

    def upgrade(
        self, *, only_asks: bool = False, timeout_s: float | None = None
    ) -> ClusterUpgraded:
        """Ask that every process be replaced by one with the code that is installed now; or, with
        `only_asks`, how far that is.

        Raises:
            EngineUnreachable, EngineLost: as for `status`.
        """
        return self._ask(UpgradeCluster(only_asks), ClusterUpgraded, timeout_s)

    def _ask(
        self,
        question: Question,
        kind: type[Reply],
        timeout_s: float | None,
    ) -> Reply:
        ticket = Ticket(kind)
        limit_s = self.config.reply_timeout_s if timeout_s is None else timeout_s
        with self.lock:
            self._send(self._session.ask(question, ticket))
            try:
                self._wait(lambda: ticket.is_done, limit_s, self._unreachable)
            finally:
                self._session.forget(ticket)
        if ticket.answer is None:
            assert ticket.failure is not None
            raise ticket.failure
        assert isinstance(ticket.answer, kind)
        return ticket.answer

    # Requests

    def draft(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        prompt_text: str | None = None,
    ) -> Draft:
        """Check a request and complete it. Encodes text, so it may take a while.

        Raises:
            InvalidRequest: it cannot be served.
            EngineUnreachable, ProtocolMismatch, ClientClosed
        """
        info, tokenizer = self.info(), self.tokenizer()
        return draft_of(
            prompt,
            self.default_sampling() if sampling is None else sampling,
            RequestOptions() if options is None else options,
            info=info,
            tokenizer=tokenizer,
            seed=self._draw_seed(),
            request_id=f"request-{next(self._numbers)}",
            prompt_text=prompt_text,
        )

    def submit(self, draft: Draft, watcher: Watcher | None = None) -> LiveRequest:
        """Send a request; `watcher` is told of every change, by another thread.

        Raises:
            EngineUnreachable, ProtocolMismatch, ClientClosed
        """
        with self.lock:
            self.info()
            live, messages = self._session.submit(draft, self._clock())
            try:
                self._send(messages)
            except WireError as error:
                self._session.cancel(live)
                raise InvalidRequest(str(error)) from error
            if watcher is not None:
                live.watchers.append(watcher)
            return live

    def cancel(self, live: LiveRequest) -> None:
        """End a request with what it has so far; nothing if it is done."""
        with self.lock:
            if not live.is_done:
                self._send(self._session.cancel(live))

    def wait_done(self, live: LiveRequest, timeout_s: float | None) -> None:
        """Wait until a request is done.

        Raises:
            WaitTimedOut: it was not within `timeout_s`; it goes on.
        """
        self.wait_for(live, lambda: live.is_done, timeout_s)

    def wait_for(
        self, live: LiveRequest, condition: Callable[[], bool], timeout_s: float | None
    ) -> None:
        """Wait until `condition`, asked with the lock held whenever the request changes."""
        with self.lock:
            if condition():
                return
            changed = threading.Condition(self.lock)

            def tell(_: LiveRequest) -> None:
                changed.notify_all()

            live.watchers.append(tell)
            try:
                if not changed.wait_for(condition, timeout_s):
                    raise WaitTimedOut(
                        f"{live.draft.request_id} was not answered within {timeout_s:g} s; it "
                        "goes on. Wait again, or cancel it"
                    )
            finally:
                live.watchers.remove(tell)

    def close(self) -> None:
        """Abort what is live, let the last messages leave, and end the thread. Idempotent."""
        with self.lock:
            if not self._is_closing.is_set():
                self._is_closing.set()
                is_heard = self._session.info is not None
                self._linger_s = self.config.close_timeout_s if is_heard else 0.0
                self._outbox.extend(map(FROM_CLIENT.encode, self._session.abort_all()))
                self._give_up(ClientClosed("the client was closed"))
                self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(self.config.close_timeout_s + 1.0)
        if self._tokenizer is not None:
            self._tokenizer[1].close()

    # Waiting, with the lock held

    def _wait(
        self, condition: Callable[[], bool], limit_s: float, error: Callable[[float], Exception]
    ) -> None:
        """Wait for what the connection brings; `error` makes what is raised when time is up."""
        self._changed.wait_for(lambda: condition() or self._dead is not None, limit_s)
        if condition():
            return
        raise self._dead or error(limit_s)

    def _unreachable(self, limit_s: float) -> Exception:
        return unreachable(
            self.config.address,
            limit_s,
            news=self._session.news,
            last_loss=self._last_loss,
            key_file=self.config.key_file,
        )

    def _fetch_tokenizer(self, digest: str) -> Tokenizer:
        session = self._session
        with self.lock:
            self._send(session.ask_tokenizer())
            self._wait(
                lambda: session.tokenizer_files is not None or session.info is None,
                self.config.reply_timeout_s,
                lambda limit_s: EngineUnreachable(
                    f"the engine at {self.config.address} did not send its tokenizer's files "
                    f"within {limit_s:g} s"
                ),
            )
            files = session.tokenizer_files
        if files is None or files.digest != digest:
            raise EngineLost("the connection ended before the tokenizer's files were here")
        return Tokenizer(files)

    def _send(self, messages: Iterable[FromClient]) -> None:
        if self._dead is not None:
            raise self._dead
        frames = [FROM_CLIENT.encode(message) for message in messages]
        if frames:
            self._outbox.extend(frames)
            self._wake()

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    # The thread that owns the socket

    def _run(self) -> None:
        pause_s = self.config.shortest_redial_s
        try:
            while not self._is_closing.wait(pause_s if self._last_loss else 0.0):
                self._keep_time()
                if self._serve_one_connection():
                    pause_s = self.config.shortest_redial_s
                else:
                    pause_s = min(2 * pause_s, self.config.longest_redial_s)
        except (ProtocolMismatch, AddressError) as error:
            self._give_up(error)
        except Exception as error:
            self._log.error("client_thread_failed", error=traceback.format_exc())
            self._give_up(EngineLost(f"the client's own thread failed: {error!r}"))
        finally:
            with self.lock:
                os.close(self._wake_fd)
                self._wake_fd = -1

    def _serve_one_connection(self) -> bool:
        """Exchange messages until the connection or the client ends; True if it was of use."""
        try:
            link = self.config.dial()
        except KeyFileError as error:  # there may be one again when there is an engine again
            return self._lose(error)
        try:
            for hello in self._session.hello():
                link.send(FROM_CLIENT.encode(hello))
            while not self._exchange(link):
                link.wait(self._keep_time(), (self._wake_fd,))
        except (LinkLost, WireError, BadMessage, EngineLost) as error:
            return self._lose(error)
        finally:
            link.close(self._linger_s)
        return True

    def _exchange(self, link: DealerLink) -> bool:
        """Take in what has come, send what is to be sent; True if this was the last time."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        is_last = self._is_closing.is_set()
        while (frame := link.take()) is not None:
            self._take(TO_CLIENT.decode(frame))
        if link.why_not:
            raise LinkLost(link.why_not)
        with self.lock:
            frames = list(self._outbox)
            self._outbox.clear()
        for frame in frames:
            link.send(frame)
        return is_last

    def _keep_time(self) -> float | None:
        """Give up requests that have waited too long for another engine, or in vain.

        Returns for how long the others may wait before the next look; None: there are none.
        """
        with self.lock:
            if not self._session.num_orphans:
                return None
            if self._is_over is not None and self._is_over():
                self._session.lose(EngineLost(f"the cluster has ended: {self._last_loss}"))
            now = self._clock()
            self._outbox.extend(map(FROM_CLIENT.encode, self._session.keep_time(now)))
            deadline = self._session.next_deadline_s
            if deadline is None:
                return None
            return min(max(deadline - now, 0.0), _LONGEST_LOOK_S)

    def _take(self, message: ToClient) -> None:
        with self.lock:
            before = self._session.num_continued
            replies = self._session.receive(message, self._clock())
            self._outbox.extend(map(FROM_CLIENT.encode, replies))
            if count := self._session.num_continued - before:
                self._log.info("requests_continued", count=count, lost=self._last_loss)
            if not isinstance(message, TokenBatch):
                self._changed.notify_all()

    def _lose(self, error: Exception) -> bool:
        """The connection ended; returns whether it had come to a ready engine."""
        with self.lock:
            was_ready = self._session.info is not None
            num_live = self._session.num_live
            self._last_loss = str(error)
            self._outbox.clear()
            lost = EngineLost(f"lost the engine at {self.config.address}: {error}")
            if self._is_closing.is_set() or isinstance(error, WireError | BadMessage):
                self._session.lose(lost)  # what cannot be read would come again
            else:
                self._session.wait_for_next(lost, self._clock())
            self._changed.notify_all()
        if not self._is_closing.is_set():
            tell = self._log.info if self._session.is_end_announced else self._log.warning
            tell("connection_lost", live=num_live, reason=error)
        return was_ready

    def _give_up(self, error: Exception) -> None:
        with self.lock:
            self._dead = self._dead or error
            self._session.lose(self._dead)
            self._changed.notify_all()
