"""What the engine says to clients: hellos, requests, news, and its own opening and closing.

The desk judges nothing about a request but whether it can be read and whether the engine takes
requests now; the rest is the scheduler's. What clients ask of the engine itself is handed on.
"""

import re
import traceback
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from msgspec.structs import replace

from cluster.clients import Clients
from cluster.errors import WireError
from cluster.frontend.tokenizer_files import TokenizerFiles
from cluster.links.server import ServerLink
from cluster.logs import EventLog
from cluster.messages.changes import Change, UpgradeCluster
from cluster.messages.clients import (
    AskTurn,
    CancelByLabel,
    Cancelled,
    ClientHello,
    EngineStarting,
    EngineStopping,
    Refusal,
    ServerInfo,
    TokenizerRequest,
    YourTurn,
)
from cluster.messages.faults import InjectFault
from cluster.messages.reports import MetricsRequest, StatusRequest, WatchSteps
from cluster.messages.sockets import FromClient, ToClient
from cluster.step_feed import StepFeed
from cluster.turns import Turns
from cluster.wire import FROM_CLIENT, PROTOCOL_VERSION, TO_CLIENT, handle_of
from scheduler.outbox import Outgoing
from scheduler.request import Abort, Finish, Rejection, Request, TokenBatch, failed_batch
from scheduler.scheduler import Scheduler, why_failed


def is_worth_a_line(total: int) -> bool:
    """The 1st, 2nd, 4th, 8th, … of a kind, so that a flood of them does not flood the log."""
    return total & (total - 1) == 0


Wish: TypeAlias = Change | UpgradeCluster | InjectFault | MetricsRequest | StatusRequest
"""What clients ask of the engine, not of the desk or the scheduler."""

_LOADING = "the model is being loaded; requests are taken when it is"


class FrontDesk:
    """The front socket's side of the engine."""

    def __init__(
        self,
        link: ServerLink,
        tokenizer: TokenizerFiles | None,
        info: ServerInfo,
        log: EventLog,
        steps: StepFeed,
    ) -> None:
        """
        Args:
            tokenizer: None: the model has none.
            info: for clients; the limits of the model are filled in when a group has said them.
        """
        self._link = link
        self._tokenizer_frame = None if tokenizer is None else TO_CLIENT.encode(tokenizer)
        self._outline = info
        self._log = log
        self._steps = steps
        self._news: list[Outgoing] = []
        self.clients = Clients(link, log)
        self.num_dropped = 0
        """Messages that could not be read, or came from peers without a hello."""
        self.prompt_tokens = 0
        """Of requests that were accepted."""
        self.refused: dict[str, int] = {}
        """Requests refused before the scheduler saw them, by reason."""
        self._turns = Turns()
        self._scheduler: Scheduler | None = None
        self._info: ServerInfo | None = None
        self._stopping: EngineStopping | None = None
        self._no_workers = ""
        self._retry_after_s: float | None = None

    # --- what the engine does with it ---

    def open(self, scheduler: Scheduler, now: float) -> None:
        """Requests are taken from now on; clients who came early are told."""
        model = scheduler.model
        info = replace(
            self._outline, max_model_len=model.max_model_len, vocab_size=model.vocab_size
        )
        is_news = self._info != info or self._no_workers != ""
        self._scheduler, self._info, self._no_workers = scheduler, info, ""
        if is_news:
            self._tell_all(info, now)

    def lack_workers(self, why: str, retry_after_s: float | None, now: float) -> None:
        """Refuse requests until `open`, and those that wait and have no token yet.

        `retry_after_s`: None if no group will come.
        """
        self._no_workers, self._retry_after_s = why, retry_after_s
        if self._scheduler is None:
            return
        fresh = [s for s in self._scheduler.waiting if len(s.tokens) == s.num_prompt]
        for sequence in fresh:
            handle = sequence.request.handle
            self._scheduler.abort(sequence.client, [handle], now)
            self._count_refused("no_workers")
            self.send(sequence.client, self._lacks(handle), now)

    def _lacks(self, handle: int) -> Rejection:
        return Rejection(
            handle=handle,
            reason="no_workers",
            message=self._no_workers,
            retry_after_s=self._retry_after_s,
        )

    def close(self, message: str, drain_s: float, now: float) -> None:
        """Take no more requests; those that were taken go on."""
        self._stopping = EngineStopping(message=message, drain_s=drain_s)
        self._tell_all(self._stopping, now)

    def hand_over(self, message: str, now: float) -> None:
        """Take no more requests; another engine goes on with those that run."""
        self._stopping = EngineStopping(message=message, hands_over=True)
        self._tell_all(self._stopping, now)

    def receive(self, now: float) -> Iterator[tuple[int, Wish]]:
        """Take in who left and what was sent; what is not for the desk comes with its client, to
        be answered."""
        for peer, frame in self._link.receive():
            if frame is None:
                self._forget(self.clients.left(peer), now)
                continue
            try:
                message = FROM_CLIENT.decode(frame)
            except WireError as error:
                self._refuse_unreadable(peer, frame, error)
            else:
                wish = self._take(peer, message, now)
                if wish is not None:
                    yield wish
        self._begin_turn(now)

    def send(self, client: int, message: ToClient, now: float) -> None:
        """Answer a wish, or say something unasked; who cannot take it loses its requests."""
        if not self.clients.send(client, message, now):
            self._forget(client, now)
        elif self._turns.has_begun:
            self._end_turn(client, message)

    def _end_turn(self, client: int, message: ToClient) -> None:
        """If it says that the suspect whose turn it is has a token or has ended."""
        match message:
            case Rejection(handle=handle):
                self._turns.over(client, (handle,))
            case TokenBatch(handle=handles, count=counts, finish=finishes):
                if len(counts):  # a row without a token may be one of log-probabilities
                    goes_on = counts == 0
                    goes_on &= finishes == 0 if len(finishes) else True
                    handles = handles[~goes_on]
                self._turns.over(client, handles)

    def _begin_turn(self, now: float) -> None:
        """Of the next suspect, if none has one."""
        while (turn := self._turns.begin()) is not None:
            client, handle = turn
            self._log.warning("suspect_has_turn", client=client, handle=handle)
            self.send(client, YourTurn(handle), now)

    def give_up(self, client: int, handle: int, error: BaseException, now: float) -> None:
        """End a request that we cannot handle."""
        self.note_failure(client, handle, error)
        self.send(client, failed_batch(handle, why_failed(error)), now)

    def note_failure(self, client: int, handle: int, error: BaseException) -> None:
        """Say in the log which request it was, and where in our code."""
        self._log.error("request_failed", client=client, handle=handle, error=repr(error))
        traceback.print_exception(error)

    def queue(self, news: Iterable[Outgoing]) -> None:
        """Keep it for `deliver`: workers get their plans first."""
        self._news += news

    def deliver(self, now: float) -> None:
        """Send each client what was queued for it, and the steps to those who watch."""
        news, self._news = self._news, []
        for outgoing in news:
            self.send(outgoing.client, outgoing.batch, now)
        if steps := self._steps.news(self._scheduler, now):
            for client in self._steps.watchers:
                self.send(client, steps, now)
        self._begin_turn(now)

    @property
    def next_deadline(self) -> float | None:
        deadlines = (self.clients.next_deadline, self._steps.next_news_at(self._scheduler))
        return min((at for at in deadlines if at is not None), default=None)

    def keep_time(self, now: float) -> None:
        self.clients.say_farewell(now)

    # --- messages ---

    def _take(self, peer: bytes, message: FromClient, now: float) -> tuple[int, Wish] | None:
        if isinstance(message, ClientHello):
            self._greet(peer, message, now)
            return None
        client = self.clients.number_of(peer)
        if client is None:
            self._refuse(peer, "no_hello", "say ClientHello first; if you did, you were cut off")
            return None
        match message:
            case Request():
                self._submit(client, message, now)
            case AskTurn(handle=handle):
                self._turns.ask(client, handle)
            case Abort():
                self._turns.over(client, message.handle)
                if self._scheduler is not None:
                    self._scheduler.abort(client, message.handle.tolist(), now)
            case CancelByLabel(label=label):
                self._cancel(client, label, now)
            case TokenizerRequest():
                self._send_tokenizer(peer)
            case WatchSteps(enabled=True):
                self._steps.watch(client)
            case WatchSteps():
                self._steps.leave(client)
            case _:
                return client, message
        return None

    def _greet(self, peer: bytes, hello: ClientHello, now: float) -> None:
        if hello.protocol != PROTOCOL_VERSION:
            self._refuse(
                peer,
                "protocol",
                f"the engine speaks protocol {PROTOCOL_VERSION}, the client {hello.protocol}; "
                "install the same version of Stoker on both sides",
            )
            return
        self._forget(self.clients.number_of(peer), now)  # a second hello begins anew
        client = self.clients.greet(peer, hello.label)
        answer: ToClient = EngineStarting(message=_LOADING)
        if self._stopping is not None:
            answer = self._stopping
        elif self._info is not None:
            answer = self._info
        self.send(client, answer, now)

    def _submit(self, client: int, request: Request, now: float) -> None:
        answer: Rejection | TokenBatch | None = self._why_closed(request.handle)
        if isinstance(answer, Rejection):
            self._count_refused(answer.reason)
        else:
            assert self._scheduler is not None
            try:
                answer = self._scheduler.submit(request, client, now)
            except Exception as error:  # nothing of it was kept, so it ends alone
                self.give_up(client, request.handle, error, now)
                return
        if not isinstance(answer, Rejection):
            self.prompt_tokens += len(request.prompt)
        else:
            self._log.debug(
                "request_refused", client=client, handle=request.handle, reason=answer.reason
            )
        if answer is not None:
            self.send(client, answer, now)

    def _cancel(self, client: int, label: str, now: float) -> None:
        """End the requests of that label, of any client, and tell the one who asked."""
        serials: list[int] = []
        if self._scheduler is not None and label:
            name = re.escape(label)
            theirs = re.compile(rf"{name} .*|(.* )?{name}(-[0-9]{{1,3}})?")
            serials = [
                sequence.serial
                for sequence in self._scheduler.live.values()
                if theirs.fullmatch(sequence.request.label)
            ]
            # Without a message: with one, the engine itself would have given them up.
            ends = self._scheduler.end_early(serials, Finish.ABORT, "", now)
            for outgoing in ends:
                self.send(outgoing.client, outgoing.batch, now)
        self._log.info("requests_cancelled", client=client, label=label[:64], count=len(serials))
        self.send(client, Cancelled(label, len(serials)), now)

    def _why_closed(self, handle: int) -> Rejection | None:
        if self._stopping is not None:
            return Rejection(
                handle=handle,
                reason="shutting_down",
                message=self._stopping.message,
                retry_after_s=max(1.0, self._stopping.drain_s),
            )
        if self._no_workers:
            return self._lacks(handle)
        if self._scheduler is None:
            return Rejection(
                handle=handle, reason="no_workers", message=_LOADING, retry_after_s=1.0
            )
        return None

    def _send_tokenizer(self, peer: bytes) -> None:
        if self._tokenizer_frame is None:
            self.clients.answer(
                peer,
                Refusal(
                    reason="no_tokenizer",
                    message="the model's directory holds no tokenizer; send token ids",
                ),
            )
        else:
            self.clients.answer_frame(peer, self._tokenizer_frame)

    def _refuse(self, peer: bytes, reason: str, message: str) -> None:
        self._count_dropped(reason, message)
        self.clients.answer(peer, Refusal(reason=reason, message=message))

    def _refuse_unreadable(self, peer: bytes, frame: bytes, error: WireError) -> None:
        """A request with a bad field is refused as itself, anything else as no message."""
        handle = handle_of(frame)
        if handle is None or self.clients.number_of(peer) is None:
            self._refuse(peer, "unreadable", str(error))
            return
        self._count_dropped("invalid", str(error))
        self._count_refused("invalid")
        self.clients.answer(peer, Rejection(handle=handle, reason="invalid", message=str(error)))

    def _count_dropped(self, reason: str, message: str) -> None:
        self.num_dropped += 1
        if is_worth_a_line(self.num_dropped):
            self._log.warning(
                "front_message_dropped", total=self.num_dropped, reason=reason, error=message
            )

    def _count_refused(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def _tell_all(self, message: ToClient, now: float) -> None:
        for client in self.clients.numbers:
            self.send(client, message, now)

    def _forget(self, client: int | None, now: float) -> None:
        """Drop every request of a client that is gone."""
        if client is None:
            return
        self._steps.leave(client)
        self._turns.left(client)
        if self._scheduler is not None:
            self._scheduler.abort_client(client, now)
