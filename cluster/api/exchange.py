"""One HTTP call from its first byte to its last: its ids, and its line in the log.

An exchange is made by `ExchangeLog`, which stands around everything else. Routes need not know
of it: `ApiServer.open_call` notes which requests of the engine belong to the exchange at hand.
"""

import re
import secrets
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api.calls import Call
from cluster.logs import EventLog

REQUEST_ID = "x-request-id"

_TRACE_HEADERS = ("traceparent", "tracestate")
_PLAIN_ID = re.compile(r"[\x21-\x7e]{1,128}")
"""What is taken over from a caller: neither spaces nor what could break a line of a log."""


@dataclass(slots=True, kw_only=True)
class Exchange:
    """What is known of a call, by whoever asks meanwhile or at its end."""

    request_id: str
    """The caller's own `X-Request-Id`, or one that we made; answers and the log carry it."""
    is_named: bool
    """Whether the id is the caller's own."""
    method: str
    path: str
    client: str
    began_s: float
    route: str = ""
    """The pattern of the path; empty until a route was found."""
    status: int = 0
    """0: the caller left before there was an answer."""
    model: str = ""
    """The name of what it asked, if it asked the engine for anything."""
    call: Call | None = None
    """The requests that it made of the engine, if any."""
    ended_s: float = 0.0
    is_passed_on: bool = False
    """Whether another API server answers it, and counts it."""
    trace_headers: dict[str, str] = field(default_factory=dict)
    """`traceparent` and `tracestate`, if the caller is traced (W3C Trace Context)."""

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s

    def figures(self) -> dict[str, object]:
        """Of what the engine did for it; empty if nothing was asked of it."""
        call = self.call
        if call is None:
            return {}
        outputs = call.outputs
        submitted = min((live.submitted_s for live in call.requests), default=self.began_s)
        arrivals = [output.arrivals_s[0] for output in outputs if output.arrivals_s]
        figures: dict[str, object] = {
            "call": call.id,
            "model": self.model,
            "prompt_tokens": sum(live.draft.num_prompt for live in call.requests),
            "cached_tokens": sum(output.num_cached_tokens for output in outputs),
            "output_tokens": sum(len(output.token_ids) for output in outputs),
            "queue_s": max((output.queue_s for output in outputs), default=0.0),
        }
        if arrivals:
            figures["ttft_s"] = min(arrivals) - submitted
        finishes = dict.fromkeys(output.finish.name.lower() for output in outputs)
        figures["finish"] = "client_left" if call.has_left else ",".join(finishes)
        return figures


_log = EventLog("api")

CURRENT: ContextVar[Exchange | None] = ContextVar("stoker_exchange", default=None)
"""The exchange that the running code answers. Set by `ExchangeLog` alone."""


def note_call(call: Call, model: str) -> None:
    """Let the exchange at hand know its requests."""
    exchange = CURRENT.get()
    if exchange is not None:
        exchange.call, exchange.model = call, model
        _log.debug("call_opened", call=call.id, id=exchange.request_id)


def label_of(call_id: str) -> str:
    """What the engine knows a request by: the caller's own id, if it gave one, and ours."""
    exchange = CURRENT.get()
    return f"{exchange.request_id} {call_id}" if exchange and exchange.is_named else call_id


class ExchangeLog:
    """Gives each call its id and each answer the header, and writes one line when it is over."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        is_leaving: Callable[[], bool],
        observe: Callable[[Exchange], None],
        log: EventLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            is_leaving: whether this server takes no more work, so that callers should connect
                elsewhere.
            observe: told of each exchange that is over.
        """
        self._app = app
        self._is_leaving = is_leaving
        self._observe = observe
        self._log = log
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = self._begin(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                headers = MutableHeaders(raw=message["headers"])
                headers[REQUEST_ID] = exchange.request_id
                if self._is_leaving():
                    headers["connection"] = "close"
            await send(message)

        token = CURRENT.set(exchange)
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            CURRENT.reset(token)
            if exchange.call is not None:
                exchange.call.close()  # whatever became of the route, nothing runs on for nobody
            self._end(exchange, scope)

    def _begin(self, scope: Scope) -> Exchange:
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID, "")
        client = scope.get("client")
        is_named = _PLAIN_ID.fullmatch(given) is not None
        return Exchange(
            request_id=given if is_named else f"req-{secrets.token_hex(12)}",
            is_named=is_named,
            method=scope["method"],
            path=scope["path"],
            client=client[0] if client else "",
            began_s=self._clock(),
            trace_headers={name: headers[name] for name in _TRACE_HEADERS if name in headers},
        )

    def _end(self, exchange: Exchange, scope: Scope) -> None:
        exchange.ended_s = self._clock()
        exchange.route = getattr(scope.get("route"), "path", "")
        if not exchange.is_passed_on:
            self._observe(exchange)
        # Probes and scrapes come every few seconds, and say nothing while all is well.
        is_routine = exchange.method == "GET" and exchange.status < 400
        tell = self._log.debug if is_routine else self._log.info
        tell(
            "request",
            id=exchange.request_id,
            client=exchange.client,
            method=exchange.method,
            route=exchange.route or exchange.path[:100],
            status=exchange.status or "left",
            seconds=exchange.seconds,
            **exchange.figures(),
        )
