"""One connection to an engine, owned by the asyncio loop that uses it.

No thread and no lock: the loop watches the socket's descriptors, and whatever has come is
taken in within one callback, which tells the watchers of the requests that changed. All of
the protocol is in `FrontSession`. When the connection breaks, every request on it fails with
`EngineLost` and the client dials again, so that later requests work as soon as an engine
listens. `EngineClient` is the same for threads.
"""

import asyncio
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from msgspec import Struct

from cluster.errors import AddressError, LinkLost, WireError
from cluster.frontend.draft import Draft, default_sampling
from cluster.frontend.engine_client import ClientConfig, check_key, seeds_from
from cluster.frontend.errors import ClientClosed, EngineLost, ProtocolMismatch, unreachable
from cluster.frontend.requests import LiveRequest, Watcher
from cluster.frontend.session import BadMessage, FrontSession
from cluster.frontend.tokenizer_files import TokenizerFiles
from cluster.links import DealerLink, LinkLimits, check_address
from cluster.logs import EventLog
from cluster.messages import (
    FromClient,
    GenerationDefaults,
    ServerInfo,
    Status,
    StatusRequest,
    ToClient,
)
from cluster.wire import FROM_CLIENT, PROTOCOL_VERSION, TO_CLIENT
from scheduler.errors import InvalidRequest
from scheduler.request import TokenBatch
from scheduler.sampling import SamplingParams

MESSAGES_PER_TURN = 8
MOST_MESSAGES_PER_TURN = 32
"""Messages taken in before others on the loop have their turn: at first, and after turns that
did not take all. Tokens that come faster than they can be written thus leave in fewer and larger
chunks, which cost less, at the price of longer turns."""

SEND_TIMEOUT_S = 5.0
"""How long an engine that does not read is borne before the connection counts as lost."""

Reply = TypeVar("Reply", bound=Struct)


class LoopClient:
    """Submits requests to one engine and keeps their state. For one loop, not for threads.

    Raises:
        AddressError: the address is not one that can be dialled.
    """

    def __init__(
        self,
        config: ClientConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw_seed: Callable[[], int] | None = None,
    ) -> None:
        check_address(config.address)
        check_key(config.server_key)
        self.config = config
        self.draw_seed = seeds_from(None) if draw_seed is None else draw_seed
        """For `draft_of`: seeds of requests that have none."""
        self._log = EventLog("client", address=config.address)
        self._clock = clock
        self._session = FrontSession(PROTOCOL_VERSION, config.label)
        self._outbox: deque[bytes] = deque()
        self._link: DealerLink | None = None
        self._redial: asyncio.TimerHandle | None = None
        self._pause_s = config.shortest_redial_s
        self._send_limit: asyncio.TimerHandle | None = None
        self._is_turn_due = False
        self._turn_messages = MESSAGES_PER_TURN
        self._is_heard = False  # the engine has answered on this connection
        self._dead: Exception | None = None  # why nothing will ever work again
        self._last_loss = ""
        self._news = asyncio.Event()  # replaced whenever it is set
        self._questions: list[_Question] = []
        self._subscriptions: list[_Subscription] = []
        self._checked_files: TokenizerFiles | None = None
        self._defaults: tuple[GenerationDefaults, SamplingParams] | None = None

    def start(self) -> None:
        """Begin to dial, and go on until closed. Called once, on the loop."""
        assert self._link is None, "started twice"
        self._dial()

    # What the engine is

    @property
    def info(self) -> ServerInfo | None:
        """What the engine serves; None while none is connected that is ready."""
        return self._session.info

    @property
    def news(self) -> str:
        """What the engine last said about itself: starting, or stopping. Else empty."""
        return self._session.news

    @property
    def num_live(self) -> int:
        """Outputs that the engine works on for this client."""
        return self._session.num_live

    async def wait_ready(self, timeout_s: float | None = None) -> ServerInfo:
        """What the engine serves, once it is ready.

        Raises:
            EngineUnreachable: none was ready within `timeout_s` (default: the config's).
            ProtocolMismatch, ClientClosed
        """
        limit_s = self.config.connect_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._until(lambda: self._session.info is not None)
        except TimeoutError:
            raise self._unreachable(limit_s) from None
        assert self._session.info is not None
        return self._session.info

    async def tokenizer_files(self) -> TokenizerFiles | None:
        """The files of the model's tokenizer, brought over once; None if it has none.

        Raises:
            EngineUnreachable: no engine was ready, or it did not send them in time.
            EngineLost: the connection broke meanwhile.
            ProtocolMismatch, ClientClosed
        """
        info, session = await self.wait_ready(), self._session
        if not info.tokenizer_digest:
            return None
        self._send(session.ask_tokenizer())
        limit_s = self.config.reply_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._until(
                    lambda: session.tokenizer_files is not None or session.info is None
                )
        except TimeoutError:
            raise self._unreachable(limit_s) from None
        files = session.tokenizer_files
        if files is None:
            raise EngineLost("the connection ended before the tokenizer's files were here")
        if files is not self._checked_files:
            if files.digest != info.tokenizer_digest:  # 7 ms for a vocabulary of 49,152
                raise EngineLost("the engine serves another model meanwhile")
            self._checked_files = files
        return files

    def default_sampling(self) -> SamplingParams:
        """What holds where a caller gives no sampling parameters.

        Raises:
            EngineUnreachable, ProtocolMismatch, ClientClosed
        """
        given = self._ready_info().defaults
        if self._defaults is None or self._defaults[0] != given:
            self._defaults = (given, default_sampling(given))
        return self._defaults[1]

    # Requests

    def submit(self, draft: Draft, watcher: Watcher | None = None) -> LiveRequest:
        """Send a request; `watcher` is called on the loop, once per batch of news.

        Raises:
            InvalidRequest: it is too large for a message.
            EngineUnreachable: no engine is ready now.
            ProtocolMismatch, ClientClosed
        """
        self._ready_info()
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
        if not live.is_done:
            self._send(self._session.cancel(live))

    # Anything else

    async def status(self, timeout_s: float) -> Status:
        """How the engine is, by a round trip through its loop; also while it starts.

        Raises:
            EngineUnreachable: no answer within `timeout_s`.
            EngineLost: the connection broke meanwhile.
        """
        return await self.ask(StatusRequest(), Status, timeout_s)

    async def ask(self, message: FromClient, kind: type[Reply], timeout_s: float) -> Reply:
        """Send a question and wait for its answer, which is the next message of that kind.

        Whoever asks the same while an answer is under way shares it, so that many callers, or
        a frozen engine, do not pile up questions.

        Raises:
            EngineUnreachable: no answer within `timeout_s`.
            EngineLost: the connection broke meanwhile.
            ProtocolMismatch, ClientClosed
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._until(lambda: self._is_heard)
                answer = await asyncio.shield(self._answer_to(message, kind))
        except TimeoutError:
            raise self._unreachable(timeout_s) from None
        assert isinstance(answer, kind)
        return answer

    def tell(self, message: FromClient) -> None:
        """Send a message that is not answered.

        Raises:
            EngineUnreachable: no engine is ready now.
            ProtocolMismatch, ClientClosed
        """
        self._ready_info()
        self._send([message])

    def subscribe(
        self,
        kind: type[Reply],
        listener: Callable[[Reply], None],
        *,
        opening: FromClient,
        closing: FromClient,
    ) -> Callable[[], None]:
        """Have `listener` called on the loop with each message of a kind that nobody asked for.

        The engine is sent `opening` for the first listener of a kind, and again on each new
        connection, and `closing` after the last one. Returns what ends the subscription.
        """

        def hear(message: Struct) -> None:
            assert isinstance(message, kind)
            listener(message)

        subscription = _Subscription(kind, hear, opening, closing)
        self._subscriptions.append(subscription)
        if self._is_heard and self._num_listeners(kind) == 1:
            self._send([opening])

        def end() -> None:
            if subscription not in self._subscriptions:
                return
            self._subscriptions.remove(subscription)
            if self._is_heard and not self._num_listeners(kind):
                self._send([closing])

        return end

    async def close(self) -> None:
        """Abort what is live, let the last messages leave, and hang up. Idempotent."""
        if isinstance(self._dead, ClientClosed):
            return
        link, self._link = self._link, None
        messages = self._session.abort_all()
        linger_s = self.config.close_timeout_s if self._session.info is not None else 0.0
        self._give_up(ClientClosed("the client was closed"))
        if link is None:
            return
        self._unwatch(link)
        frames = [*self._outbox, *map(FROM_CLIENT.encode, messages)]
        self._outbox.clear()
        for frame in frames:
            if not link.offer(frame):
                break
        await asyncio.to_thread(link.close, linger_s)

    # Waiting

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for what the connection brings."""
        while not condition():
            if self._dead is not None:
                raise self._dead
            await self._news.wait()

    def _tell_waiting(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _ready_info(self) -> ServerInfo:
        if self._dead is not None:
            raise self._dead
        if self._session.info is None:
            raise self._unreachable(0.0)
        return self._session.info

    def _unreachable(self, limit_s: float) -> Exception:
        return unreachable(
            self.config.address, limit_s, news=self._session.news, last_loss=self._last_loss
        )

    def _answer_to(self, message: FromClient, kind: type[Reply]) -> "asyncio.Future[Struct]":
        for question in self._questions:
            if question.message == message:
                return question.answer
        question = _Question(message, kind, asyncio.get_running_loop().create_future())
        self._questions.append(question)
        self._send([message])
        return question.answer

    def _num_listeners(self, kind: type[Struct]) -> int:
        return sum(subscription.kind is kind for subscription in self._subscriptions)

    # The connection

    def _dial(self) -> None:
        self._redial = None
        limits = LinkLimits(max_message_bytes=TO_CLIENT.max_bytes)
        try:
            link = DealerLink(self.config.address, limits, curve_server_key=self.config.server_key)
        except AddressError as error:
            self._give_up(error)
            return
        except Exception as error:  # no descriptors are left, say
            self._lose(f"cannot dial: {error}")
            return
        self._link = link
        loop = asyncio.get_running_loop()
        for fd in link.fds:
            loop.add_reader(fd, self._turn)
        self._send(self._session.hello())

    def _send(self, messages: Iterable[FromClient]) -> None:
        """Messages leave at the end of this turn of the loop, or as soon as there is room."""
        if self._dead is not None:
            raise self._dead
        frames = [FROM_CLIENT.encode(message) for message in messages]
        if frames:
            self._outbox.extend(frames)
            self._turn_soon()

    def _turn_soon(self) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            asyncio.get_running_loop().call_soon(self._take_due_turn)

    def _take_due_turn(self) -> None:
        self._is_turn_due = False
        self._turn()

    def _turn(self) -> None:
        """Take in what has come and send what is to be sent, as far as it goes at once."""
        link = self._link
        if link is None:
            return
        try:
            if self._take_some(link):
                self._turn_messages = MESSAGES_PER_TURN
            else:
                self._turn_messages = min(2 * self._turn_messages, MOST_MESSAGES_PER_TURN)
                self._turn_soon()
            self._flush(link)
        except (LinkLost, WireError, BadMessage, EngineLost) as error:
            self._lose(str(error))
        except ProtocolMismatch as error:
            self._give_up(error)
        except Exception as error:
            self._log.error("client_turn_failed", error=traceback.format_exc())
            self._lose(f"the client itself failed: {error!r}")

    def _take_some(self, link: DealerLink) -> bool:
        """Take in a turn's messages; whether that was all that there were."""
        for _ in range(self._turn_messages):
            frame = link.take()
            if frame is None:
                return True
            self._take(TO_CLIENT.decode(frame))
        return False

    def _flush(self, link: DealerLink) -> None:
        outbox = self._outbox
        if not outbox:
            return
        while outbox and link.offer(outbox[0]):
            outbox.popleft()
            self._turn_soon()  # sending may have used up the wake-up for something to take
        if outbox and self._send_limit is None:
            self._send_limit = asyncio.get_running_loop().call_later(
                SEND_TIMEOUT_S, self._give_up_sending, link, outbox[0]
            )

    def _give_up_sending(self, link: DealerLink, frame: bytes) -> None:
        self._send_limit = None
        if self._link is not link or not self._outbox:
            return
        if self._outbox[0] is frame:
            self._lose(f"the engine has not taken a message for {SEND_TIMEOUT_S:g} s")
        else:
            self._flush(link)

    def _take(self, message: ToClient) -> None:
        if isinstance(message, TokenBatch):
            self._send(self._session.receive(message, self._clock()))
            return
        if not self._is_heard:
            self._is_heard = True
            self._reopen_subscriptions()
        self._send(self._session.receive(message, self._clock()))
        if self._session.info is not None:
            self._pause_s = self.config.shortest_redial_s
        self._hand_out(message)
        self._tell_waiting()

    def _reopen_subscriptions(self) -> None:
        openings = {each.kind: each.opening for each in self._subscriptions}
        self._send(openings.values())

    def _hand_out(self, message: Struct) -> None:
        """To whoever asked for a message of this kind first, or else to all listeners."""
        kind = type(message)
        for question in self._questions:
            if question.kind is kind:
                self._questions.remove(question)
                question.answer.set_result(message)
                return
        for subscription in tuple(self._subscriptions):
            if subscription.kind is kind:
                subscription.hear(message)

    # Its end

    def _lose(self, reason: str) -> None:
        """The connection ended: fail what is live on it, and dial again after a pause."""
        num_live = self._session.num_live
        self._last_loss = reason
        self._drop_link()
        self._fail_all(EngineLost(f"lost the engine at {self.config.address}: {reason}"))
        self._log.warning("connection_lost", live=num_live, reason=reason)
        if self._dead is None and self._redial is None:
            self._redial = asyncio.get_running_loop().call_later(self._pause_s, self._dial)
            self._pause_s = min(2 * self._pause_s, self.config.longest_redial_s)

    def _give_up(self, error: Exception) -> None:
        """Nothing will work any more."""
        self._dead = self._dead or error
        for timer in (self._redial, self._send_limit):
            if timer is not None:
                timer.cancel()
        self._redial = self._send_limit = None
        if self._link is not None:
            self._drop_link()
        self._fail_all(self._dead)

    def _drop_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            self._unwatch(link)
            link.close()
        self._outbox.clear()

    def _unwatch(self, link: DealerLink) -> None:
        loop = asyncio.get_running_loop()
        for fd in link.fds:
            loop.remove_reader(fd)

    def _fail_all(self, failure: Exception) -> None:
        self._is_heard = False
        questions, self._questions = self._questions, []
        for question in questions:
            question.answer.set_exception(failure)
            question.answer.exception()  # whoever asked may have stopped waiting
        self._session.lose(failure)
        self._tell_waiting()


class _Question:
    """A message under way, and where its answer goes."""

    def __init__(
        self, message: FromClient, kind: type[Struct], answer: "asyncio.Future[Struct]"
    ) -> None:
        self.message, self.kind, self.answer = message, kind, answer


class _Subscription:
    """A listener for messages of one kind."""

    def __init__(
        self,
        kind: type[Struct],
        hear: Callable[[Struct], None],
        opening: FromClient,
        closing: FromClient,
    ) -> None:
        self.kind, self.hear, self.opening, self.closing = kind, hear, opening, closing
