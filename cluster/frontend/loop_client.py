"""One connection to an engine, owned by the asyncio loop that uses it.

No thread and no lock: `LoopLink` has the loop watch the socket, and whatever has come is taken
in within one callback, which tells the watchers of the requests that changed. All of the
protocol is in `FrontSession`. When the connection breaks, another is dialled, and requests go on
with the engine that answers, if one does within `recovery_s`; else they fail with `EngineLost`.
`EngineClient` is the same for threads.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from msgspec import Struct

from cluster.errors import WireError
from cluster.frontend.draft import Draft, default_sampling
from cluster.frontend.engine_client import ClientConfig, seeds_from
from cluster.frontend.errors import ClientClosed, EngineLost, unreachable
from cluster.frontend.loop_link import LoopLink
from cluster.frontend.requests import LiveRequest, Watcher
from cluster.frontend.session import FrontSession
from cluster.frontend.tokenizer_files import TokenizerFiles
from cluster.links.addresses import check_address
from cluster.logs import EventLog
from cluster.messages.clients import GenerationDefaults, ServerInfo
from cluster.messages.reports import Status, StatusRequest
from cluster.messages.sockets import FromClient, ToClient
from cluster.wire import PROTOCOL_VERSION
from scheduler.errors import InvalidRequest
from scheduler.request import TokenBatch
from scheduler.sampling import SamplingParams

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
        self.config = config
        self.draw_seed = seeds_from(None) if draw_seed is None else draw_seed
        """For `draft_of`: seeds of requests that have none."""
        self._log = EventLog("client", address=config.address)
        self._clock = clock
        self._session = FrontSession(PROTOCOL_VERSION, config.label, config.recovery_s)
        self._next_look: asyncio.TimerHandle | None = None
        self._link = LoopLink(
            config,
            hello=self._session.hello,
            take=self._take,
            ended=self._end_of_connection,
            log=self._log,
        )
        self._is_heard = False  # the engine has answered on this connection
        self._news = asyncio.Event()  # replaced whenever it is set
        self._questions: list[_Question] = []
        self._subscriptions: list[_Subscription] = []
        self._checked_files: TokenizerFiles | None = None
        self._defaults: tuple[GenerationDefaults, SamplingParams] | None = None

    def start(self) -> None:
        """Begin to dial, and go on until closed. Called once, on the loop."""
        self._link.dial()

    # What the engine is

    @property
    def info(self) -> ServerInfo | None:
        """What the engine serves; None while none is connected that is ready."""
        return self._session.info

    @property
    def is_connected(self) -> bool:
        """Whether an engine has answered on this connection, ready or not."""
        return self._is_heard

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
        self._link.send(session.ask_tokenizer())
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
            self._link.send(messages)
        except WireError as error:
            self._session.cancel(live)
            raise InvalidRequest(str(error)) from error
        if watcher is not None:
            live.watchers.append(watcher)
        return live

    def cancel(self, live: LiveRequest) -> None:
        """End a request with what it has so far; nothing if it is done."""
        if not live.is_done:
            self._link.send(self._session.cancel(live))

    def wait_no_more(self) -> None:
        """Fail what waits for another engine: none will come in time."""
        self._link.send(self._session.wait_no_more(self._clock()))
        self._look_again()

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
        self._link.send([message])

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
            self._link.send([opening])

        def end() -> None:
            if subscription not in self._subscriptions:
                return
            self._subscriptions.remove(subscription)
            if self._is_heard and not self._num_listeners(kind):
                self._link.send([closing])

        return end

    async def close(self) -> None:
        """Abort what is live, let the last messages leave, and hang up. Idempotent."""
        if isinstance(self._link.dead, ClientClosed):
            return
        linger_s = self.config.close_timeout_s if self._session.info is not None else 0.0
        last_words = self._session.abort_all()
        await self._link.close(ClientClosed("the client was closed"), last_words, linger_s)

    # Waiting

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for what the connection brings."""
        while not condition():
            if self._link.dead is not None:
                raise self._link.dead
            await self._news.wait()

    def _tell_waiting(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _ready_info(self) -> ServerInfo:
        if self._link.dead is not None:
            raise self._link.dead
        if self._session.info is None:
            raise self._unreachable(0.0)
        return self._session.info

    def _unreachable(self, limit_s: float) -> Exception:
        return unreachable(
            self.config.address,
            limit_s,
            news=self._session.news,
            last_loss=self._link.last_loss,
            key_file=self.config.key_file,
        )

    def _answer_to(self, message: FromClient, kind: type[Reply]) -> "asyncio.Future[Struct]":
        for question in self._questions:
            if question.message == message:
                return question.answer
        question = _Question(message, kind, asyncio.get_running_loop().create_future())
        self._questions.append(question)
        self._link.send([message])
        return question.answer

    def _num_listeners(self, kind: type[Struct]) -> int:
        return sum(subscription.kind is kind for subscription in self._subscriptions)

    # The connection

    def _take(self, message: ToClient) -> list[FromClient]:
        if isinstance(message, TokenBatch):
            return self._session.receive(message, self._clock())
        replies: list[FromClient] = []
        if not self._is_heard:
            self._is_heard = True
            replies += {each.kind: each.opening for each in self._subscriptions}.values()
        before = self._session.num_continued
        replies += self._session.receive(message, self._clock())
        if count := self._session.num_continued - before:
            self._log.info("requests_continued", count=count, lost=self._link.last_loss)
        self._look_again()
        if self._session.info is not None:
            self._link.was_of_use()
        self._hand_out(message)
        self._tell_waiting()
        return replies

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

    def _end_of_connection(self, failure: Exception, may_go_on: bool) -> None:
        """Have what is live on it wait or fail; whoever still waits for an engine is told."""
        num_live = self._session.num_live
        self._is_heard = False
        questions, self._questions = self._questions, []
        for question in questions:
            question.answer.set_exception(failure)
            question.answer.exception()  # whoever asked may have stopped waiting
        if may_go_on:
            self._session.wait_for_next(failure, self._clock())
        else:
            self._session.lose(failure)
        self._look_again()
        self._tell_waiting()
        if isinstance(failure, EngineLost):
            tell = self._log.info if self._session.is_end_announced else self._log.warning
            tell("connection_lost", live=num_live, reason=self._link.last_loss)

    def _look_again(self) -> None:
        """Look when the first request has waited long enough for another engine."""
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None
        deadline = self._session.next_deadline_s
        if deadline is not None:
            self._next_look = asyncio.get_running_loop().call_later(
                max(deadline - self._clock(), 0.0), self._keep_time
            )

    def _keep_time(self) -> None:
        self._next_look = None
        self._link.send(self._session.keep_time(self._clock()))
        self._look_again()


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
