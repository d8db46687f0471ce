"""What one client and one engine say to each other on the front socket, without the socket.

Messages and the time go in, messages to send come out. `FrontSession` keeps the live
requests of one connection. Handles mean nothing to another engine, so when the connection is
lost they are given up, and the requests wait for the next one (`Orphans`), to go on where they
are. Invariant: a request is in the session exactly while an output of it is live.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from cluster.frontend.draft import Draft
from cluster.frontend.errors import EngineLost, ProtocolMismatch, error_of
from cluster.frontend.recovery import Orphans
from cluster.frontend.requests import LiveOutput, LiveRequest, TokenLogprobs
from cluster.frontend.tokenizer_files import TokenizerFiles
from cluster.messages.changes import (
    Change,
    Changed,
    ClusterUpgraded,
    ModelReloaded,
    NodeDrained,
    Scaled,
    UpgradeCluster,
)
from cluster.messages.clients import (
    AskTurn,
    ClientHello,
    EngineStarting,
    EngineStopping,
    Refusal,
    ServerInfo,
    TokenizerRequest,
    YourTurn,
)
from cluster.messages.reports import Status, StatusRequest
from cluster.messages.sockets import FromClient, ToClient
from scheduler.arrays import int32
from scheduler.plan import LogprobRows
from scheduler.request import Abort, Ended, Finish, Rejection, Request, Started, TokenBatch
from scheduler.sampling import INT32_MAX


class BadMessage(ValueError):
    """A message that no engine sends; the connection cannot be trusted any further."""


Question: TypeAlias = StatusRequest | Change | UpgradeCluster
Answer: TypeAlias = Status | Changed | ClusterUpgraded


@dataclass(slots=True)
class Ticket:
    """One caller's wait for the answer to a question."""

    kind: type[Answer]
    """Of the answer: the first one of its kind that is not another caller's."""
    answer: Answer | None = None
    failure: Exception | None = None

    @property
    def is_done(self) -> bool:
        return self.answer is not None or self.failure is not None


class FrontSession:
    """One connection after the other: its state, and the requests that live on it.

    Args:
        recovery_s: how long requests of a lost connection wait for another one. 0: they fail.
    """

    def __init__(self, protocol: int, label: str = "", recovery_s: float = 0.0) -> None:
        self._protocol = protocol
        self._label = label
        self.info: ServerInfo | None = None
        """Set while requests may be sent."""
        self.tokenizer_files: TokenizerFiles | None = None
        self.news = ""
        """What the engine last said about itself: starting, or stopping."""
        self.is_end_announced = False
        """It was stopping, so that the end of the connection is no surprise."""
        self._tokenizer_digest = ""
        self.num_unknown = 0
        """News of requests that are not live, which is normal for a while after an abort."""
        self._tickets: list[Ticket] = []
        self._requests: dict[int, tuple[LiveRequest, LiveOutput]] = {}
        self._orphans = Orphans(recovery_s)
        self._served: ServerInfo | None = None
        """What the engine is, or was, that requests were submitted to last."""
        self._ready_s = 0.0
        """Since when the connection can take requests."""
        self._loss: Exception = EngineLost("no engine was there")
        """Why the last connection ended."""
        self.num_continued = 0
        """Outputs that went on with another connection, so far."""
        self._is_tokenizer_asked = False
        self._last_handle = 0

    @property
    def num_live(self) -> int:
        """Outputs that the engine still works on, or the next one will."""
        return len(self._requests) + len(self._orphans)

    @property
    def num_orphans(self) -> int:
        """Of these, those that wait for another engine."""
        return len(self._orphans)

    def hello(self) -> list[FromClient]:
        """What a new connection begins with."""
        return [ClientHello(protocol=self._protocol, label=self._label)]

    def submit(self, draft: Draft, now_s: float) -> tuple[LiveRequest, list[FromClient]]:
        """Start a request; returns its state, which later messages change, and what to send."""
        assert self.info is not None, "submitted before ServerInfo"
        handles = [self._new_handle() for _ in range(draft.sampling.n)]
        outputs = [LiveOutput(i, handle, draft.text_stream()) for i, handle in enumerate(handles)]
        live = LiveRequest(draft=draft, outputs=outputs, submitted_s=now_s)
        for output in outputs:
            self._requests[output.handle] = (live, output)
            output.presence.submitted(self.info.num_crashes)
        return live, list(draft.requests(handles))

    def cancel(self, live: LiveRequest) -> list[FromClient]:
        """End what still runs of a request, with what it has so far."""
        handles = self._drop(live)
        self._orphans.forget(live)
        for output in live.outputs:
            if output.is_live:
                output.end(Finish.ABORT)
        live.notify()
        return [Abort(int32(handles))] if handles else []

    def abort_all(self) -> list[FromClient]:
        """What to send so that the engine forgets all that is live; it stays live here."""
        return [Abort(int32(list(self._requests)))] if self._requests else []

    def ask_tokenizer(self) -> list[FromClient]:
        """Ask for the tokenizer's files, unless they are here or on their way."""
        if self._is_tokenizer_asked or self.tokenizer_files is not None:
            return []
        self._is_tokenizer_asked = True
        return [TokenizerRequest()]

    def ask(self, question: Question, ticket: Ticket) -> list[FromClient]:
        self._tickets.append(ticket)
        return [question]

    def forget(self, ticket: Ticket) -> None:
        """The caller gave up; an answer that comes later is for nobody."""
        ticket.failure = ticket.failure or EngineLost("the caller stopped waiting")

    def lose(self, failure: Exception) -> None:
        """The connection is gone, and there is no use in another: nothing will be answered."""
        self._hang_up(failure)
        lost = [*self._requests.values(), *self._orphans.take()]
        self._requests.clear()
        _fail_all(lost, failure)

    def wait_for_next(self, failure: Exception, now_s: float) -> None:
        """The connection is gone; what is live on it waits for the next one, for `recovery_s`."""
        if not self._orphans.recovery_s:
            self.lose(failure)
            return
        held_s = 0.0 if self.info is None else now_s - self._ready_s
        self._hang_up(failure)
        self._orphans.line_is_lost(now_s)
        for live, output in self._requests.values():
            self._orphans.add(live, output, now_s, held_s)
        self._requests.clear()

    def _hang_up(self, failure: Exception) -> None:
        if self.info is not None:
            self._loss = failure
        self.info, self.news, self._is_tokenizer_asked = None, "", False
        for ticket in self._tickets:
            ticket.failure = ticket.failure or failure
        self._tickets.clear()

    @property
    def next_deadline_s(self) -> float | None:
        """When `keep_time` must be called next, if nothing comes before."""
        return self._orphans.next_deadline_s

    def keep_time(self, now_s: float) -> list[FromClient]:
        """Give up what has waited too long for another engine; returns what to send."""
        handles: list[int] = []
        for live in self._orphans.expire(now_s):
            handles += self._drop(live)
            _fail(
                live,
                EngineLost(
                    f"{self._loss}. No engine went on with it within "
                    f"recovery_s={self._orphans.recovery_s:g}"
                    if self._orphans.recovery_s
                    else f"{self._loss}. This front end ends, and waits for no other engine"
                ),
            )
        return [Abort(int32(handles))] if handles else []

    def wait_no_more(self, now_s: float) -> list[FromClient]:
        """No other engine will come; returns what to send."""
        self._orphans.recovery_s = 0.0
        return self.keep_time(now_s)

    def receive(self, message: ToClient, now_s: float) -> list[FromClient]:
        """Take in one message; returns what to send in consequence.

        Raises:
            BadMessage: its columns do not fit together.
            EngineLost: the engine does not know us, or could not read us; connect anew.
            ProtocolMismatch: connecting anew does not help either.
        """
        match message:
            case TokenBatch():
                return self._take_tokens(message, now_s)
            case Rejection():
                return self._take_rejection(message, now_s)
            case ServerInfo():
                return self._take_info(message, now_s)
            case YourTurn(handle=handle):
                return self._take_turn(handle, now_s)
            case EngineStarting() | EngineStopping():
                self.news = message.message
                self.is_end_announced = isinstance(message, EngineStopping)
            case TokenizerFiles():
                self.tokenizer_files = message
            case Status() | Scaled() | NodeDrained() | ModelReloaded() | ClusterUpgraded():
                self._answer(message)
            case Refusal():
                raise _error_of_refusal(message)
        return []

    def _answer(self, answer: Answer) -> None:
        for place, ticket in enumerate(self._tickets):
            if isinstance(answer, ticket.kind):
                ticket.answer = answer
                del self._tickets[place]
                return

    def _take_info(self, info: ServerInfo, now_s: float) -> list[FromClient]:
        if info.protocol != self._protocol:
            raise ProtocolMismatch(
                f"the engine speaks protocol {info.protocol}, this client {self._protocol}: "
                "install the same version of Stoker on both sides"
            )
        if self._tokenizer_digest != info.tokenizer_digest:
            self._tokenizer_digest, self.tokenizer_files = info.tokenizer_digest, None
        if self.info is None:
            self._ready_s = now_s
        self.info, self.news, self.is_end_announced = info, "", False
        before, self._served = self._served, info
        if before is not None and _kind_of(before) != _kind_of(info):
            why = f"the engine serves {info.model} now, this was asked of {before.model}"
            _fail_all(self._orphans.take(), EngineLost(f"{self._loss}. {why}: ask again"))
        return self._carry_on(info, now_s)

    def _carry_on(self, info: ServerInfo, now_s: float) -> list[FromClient]:
        """Submit what waits, with the tokens that are here, but what may be the cause of the ends
        of engines; that asks for its turn, and is not submitted again if it has proved to be."""
        messages: list[FromClient] = []
        for live, output in self._orphans.take():
            output.handle = self._new_handle()
            if output.presence.meets(info.num_crashes):
                output.end(Finish.ERROR, message=_why_refused(output, info))
                live.notify()
            elif 0 < info.suspect_after <= output.presence.num_crashes:
                self._orphans.line_up(live, output)
                messages.append(AskTurn(output.handle))
            else:
                output.presence.submitted(info.num_crashes)
                messages.append(self._submit_again(live, output, now_s))
        return messages

    def _take_turn(self, handle: int, now_s: float) -> list[FromClient]:
        found = self._orphans.has_turn(handle)
        if found is None or self.info is None:
            return [Abort(int32([handle]))]
        live, output = found
        output.presence.submitted(self.info.num_crashes, has_turn=True)
        return [self._submit_again(live, output, now_s)]

    def _submit_again(self, live: LiveRequest, output: LiveOutput, now_s: float) -> Request:
        self._requests[output.handle] = (live, output)
        self.num_continued += 1
        age_s = max(now_s - live.submitted_s, _LEAST_AGE_S)
        return live.draft.continuation(
            output.handle, output.index, output.token_ids, age_s, output.deaths
        )

    def _take_rejection(self, rejection: Rejection, now_s: float) -> list[FromClient]:
        found = self._requests.get(rejection.handle)
        if found is None:
            self.num_unknown += 1
            return []
        live, output = found
        del self._requests[rejection.handle]
        if output.lost_s is not None and rejection.reason in _COME_AGAIN:
            self._loss = error_of(rejection)
            output.presence.withdrawn()
            self._orphans.add(live, output, now_s, held_s=0.0)
            return []
        others = self._drop(live)
        _fail(live, error_of(rejection))
        return [Abort(int32(others))] if others else []

    def _take_tokens(self, batch: TokenBatch, now_s: float) -> list[FromClient]:
        rows = _Rows.of(batch)
        touched: dict[int, LiveRequest] = {}
        if batch.logprobs is not None:
            self._take_logprobs(batch.logprobs, rows.handles)
        for started in batch.started:
            self._take_started(started)
        for suspected in batch.suspected:
            if found := self._requests.get(suspected.handle):
                found[1].deaths = suspected.deaths
        ended = {entry.handle: entry for entry in batch.ended}
        stopped: list[int] = []
        at = 0
        for handle, count, finish in zip(rows.handles, rows.counts, rows.finishes, strict=True):
            tokens = rows.tokens[at : at + count]
            at += count
            found = self._requests.get(handle)
            if found is None:
                self.num_unknown += 1
                continue
            live, output = found
            touched[id(live)] = live
            output.lost_s = None
            if tokens:
                output.presence.went_on()
            if _advance(live, output, tokens, finish, ended.get(handle), now_s):
                del self._requests[handle]
                if finish is Finish.NOT_YET:
                    stopped.append(handle)
        for live in touched.values():
            live.notify()
        return [Abort(int32(stopped))] if stopped else []

    def _take_started(self, started: Started) -> None:
        if found := self._requests.get(started.handle):
            _, output = found
            output.num_cached_tokens = started.num_cached_tokens
            output.queue_s, output.prefill_s = started.queue_s, started.prefill_s
            parts = zip(started.chunk_tokens.tolist(), started.chunk_s.tolist(), strict=False)
            output.chunks = list(parts)

    def _take_logprobs(self, columns: LogprobRows, handles: list[int]) -> None:
        for row, position, entry in _logprob_entries(columns):
            if not 0 <= row < len(handles):
                raise BadMessage(f"log-probabilities of row {row}, but there are {len(handles)}")
            found = self._requests.get(handles[row])
            if found is None:
                continue
            live, output = found
            if position < live.draft.num_prompt:
                live.prompt_logprobs[position] = entry
            else:
                output.put_logprobs(position - live.draft.num_prompt, entry)

    def _new_handle(self) -> int:
        """Never that of a live request, and not soon that of one before."""
        while True:
            self._last_handle = self._last_handle % INT32_MAX + 1
            if self._last_handle not in self._requests:
                return self._last_handle

    def _drop(self, live: LiveRequest) -> list[int]:
        """Forget the outputs of a request that an engine works on; returns their handles."""
        handles = [output.handle for output in live.outputs if output.handle in self._requests]
        for handle in handles:
            del self._requests[handle]
        return handles


_COME_AGAIN = ("shutting_down", "no_workers")
"""Reasons of a rejection that hold for an engine, not for a request that another had taken."""

_LEAST_AGE_S = 1e-3
"""Of a continuation: what has an age was taken before."""


def _why_refused(output: LiveOutput, info: ServerInfo) -> str:
    return (
        f"the engine core ended {output.presence.num_crashes} times while it had this request, "
        "which got no further in between, the last time with no other that had been there at the "
        f"ends before, so it is not computed again: {info.last_crash}"
    )


def _kind_of(info: ServerInfo) -> tuple[object, ...]:
    """What must be the same for tokens of one engine to mean the same to another."""
    return info.model, info.tokenizer_digest, info.vocab_size, info.end_ids


_FINISHES = tuple(Finish)
"""By code."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """The columns of a `TokenBatch` as lists, with defaults filled in."""

    handles: list[int]
    counts: list[int]
    tokens: list[int]
    finishes: list[Finish]

    @classmethod
    def of(cls, batch: TokenBatch) -> "_Rows":
        handles: list[int] = batch.handle.tolist()
        counts: list[int] = batch.count.tolist() if batch.count.size else [1] * len(handles)
        codes: list[int] = batch.finish.tolist() if batch.finish.size else [0] * len(handles)
        tokens: list[int] = batch.token.tolist()
        if not len(handles) == len(counts) == len(codes):
            raise BadMessage(
                f"news of {len(handles)} requests with {len(counts)} counts and "
                f"{len(codes)} finish codes"
            )
        if sum(counts) != len(tokens) or min(counts, default=0) < 0:
            raise BadMessage(f"counts that sum to {sum(counts)} for {len(tokens)} tokens")
        try:
            return cls(handles, counts, tokens, [_FINISHES[code] for code in codes])
        except IndexError:
            raise BadMessage(f"finish codes {codes}, but the highest is {max(Finish)}") from None


def _advance(
    live: LiveRequest,
    output: LiveOutput,
    tokens: list[int],
    finish: Finish,
    ended: Ended | None,
    now_s: float,
) -> bool:
    """Give one output its new tokens; True if it ended, by the engine's word or by a stop
    string, whichever comes first in the text."""
    if ended is not None:
        output.num_preemptions = ended.num_preemptions
    last = len(tokens) - 1 if finish is Finish.STOP else -1
    for i, token_id in enumerate(tokens):
        adds_text = i != last or live.draft.last_adds_text(token_id)
        if output.feed(token_id, now_s, adds_text=adds_text):
            return True
    if finish is Finish.NOT_YET:
        return False
    stop_reason: int | None = None
    if finish is Finish.STOP and tokens and tokens[-1] in live.draft.sampling.stop_token_ids:
        stop_reason = tokens[-1]
    output.end(finish, stop_reason, message=ended.message if ended else "")
    return True


def _logprob_entries(columns: LogprobRows) -> Iterable[tuple[int, int, TokenLogprobs]]:
    """(row, position, log-probabilities without the padding) of each row."""
    count, width = columns.row.size, columns.width
    sizes = (columns.token.size, columns.logprob.size)
    if any(size != count * width for size in sizes):
        raise BadMessage(f"{count} rows of {width} log-probabilities, but {sizes} values")
    if not columns.position.size == columns.rank.size == count:
        raise BadMessage(
            f"{count} rows of log-probabilities with {columns.position.size} positions and "
            f"{columns.rank.size} ranks"
        )
    rows, positions = columns.row.tolist(), columns.position.tolist()
    ids, logprobs, ranks = (
        columns.token.tolist(),
        columns.logprob.tolist(),
        columns.rank.tolist(),
    )
    for i, (row, position) in enumerate(zip(rows, positions, strict=True)):
        first = i * width
        kept = [j for j in range(first, first + width) if ids[j] >= 0]
        yield (
            row,
            position,
            TokenLogprobs(
                tuple(ids[j] for j in kept),
                tuple(logprobs[j] for j in kept),
                # After the token itself come the most probable ones, in their order.
                tuple(ranks[i] if j == first else j - first for j in kept),
            ),
        )


def _fail(live: LiveRequest, failure: Exception) -> None:
    if live.failure is None:
        live.failure = failure
    for output in live.outputs:
        if output.is_live:
            output.end(Finish.ERROR, message=str(failure))
    live.notify()


def _fail_all(outputs: Iterable[tuple[LiveRequest, LiveOutput]], failure: Exception) -> None:
    for live in {id(live): live for live, _ in outputs}.values():
        _fail(live, failure)


def _error_of_refusal(refusal: Refusal) -> Exception:
    if refusal.reason == "protocol":
        return ProtocolMismatch(refusal.message)
    return EngineLost(f"the engine refused this connection ({refusal.reason}): {refusal.message}")
