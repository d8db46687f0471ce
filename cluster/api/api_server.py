"""What every route of one API server process needs: the engine, the settings, live calls."""

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from starlette.requests import Request

from cluster.api.api_metrics import ApiMetrics
from cluster.api.calls import Call, submit_all
from cluster.api.errors import NOT_READY, SHUTTING_DOWN, UNKNOWN_MODEL, ApiError
from cluster.api.exchange import Exchange, note_call
from cluster.api.kept_calls import KeptCall, KeptCalls
from cluster.api.sse import Deliveries
from cluster.api.step_audience import StepAudience
from cluster.frontend.draft import Draft
from cluster.frontend.errors import RequestError
from cluster.frontend.loop_client import LoopClient, Reply
from cluster.frontend.tokenizer import Tokenizer
from cluster.frontend.tokenizer_pool import TokenizerPool
from cluster.http_config import HttpConfig
from cluster.logs import EventLog
from cluster.messages.clients import ServerInfo
from cluster.messages.sockets import FromClient

EARLY_S = 3600.0
"""How long an engine may take to become ready for tokenizers to be made before a call comes."""

T = TypeVar("T")


class ApiServer:
    """Reached by routes as `server_of(request)`; lives on one event loop."""

    def __init__(
        self,
        config: HttpConfig,
        engine: LoopClient,
        pool: TokenizerPool,
        *,
        metrics_dir: str = "",
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.config = config
        self.engine = engine
        self.pool = pool
        self.audience = StepAudience(engine)
        self.deliveries = Deliveries()
        self.metrics = ApiMetrics(metrics_dir)
        self.calls: dict[int, Call] = {}
        """Calls that are not answered yet, by `id`: several may read the same requests."""
        self.kept = KeptCalls(engine, keep_s=config.resume_s, max_bytes=config.resume_bytes)
        self._wall_clock = wall_clock
        self.created = self.now()
        """When this process began."""
        self.chat_templates: Mapping[str, str] = {}
        """The model's own, by name."""
        self._log = EventLog("api")
        self.is_ending = False
        """Whether this process was asked to end: streams without an end of their own end."""
        self.observers: list[Callable[[Exchange], None]] = [self.metrics.observe]
        """Told of each HTTP exchange that is over."""
        self._digest = ""

    @property
    def is_leaving(self) -> bool:
        """Whether what runs is finished, and nothing new is taken."""
        return self.is_ending or (self.engine.info is not None and bool(self.engine.news))

    def now(self) -> int:
        """Seconds since 1970, as answers say when they were made."""
        return int(self._wall_clock())

    def observe(self, exchange: Exchange) -> None:
        """An exchange is over. What goes wrong with counting it is no matter of the caller's."""
        for observer in self.observers:
            try:
                observer(exchange)
            except Exception as error:
                self._log.error("exchange_not_observed", error=repr(error))

    def leave(self) -> None:
        """This process was asked to end."""
        self.is_ending = True
        if not self.engine.is_connected:
            self.engine.wait_no_more()

    async def ask(self, question: FromClient, kind: type[Reply]) -> Reply:
        """What the engine answers to a question that is no request.

        Raises:
            EngineUnreachable, ...: nothing within `health_timeout_s`.
        """
        return await self.engine.ask(question, kind, self.config.health_timeout_s)

    @property
    def info(self) -> ServerInfo:
        """What the engine serves.

        Raises:
            ApiError: 503, no ready engine is connected, or it takes nothing new.
        """
        info = self.engine.info
        if self.is_leaving:
            why = self.engine.news or "this process was asked to end"
            raise ApiError(f"nothing new is taken: {why}", SHUTTING_DOWN)
        if info is None:
            raise ApiError(
                "the engine is not ready: it starts, or the connection to it is lost. "
                "Try again; GET /ready says when it is",
                NOT_READY,
            )
        return info

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names under which requests may ask for the model; the first is its own."""
        return self.config.served_model_names or (self.info.model,)

    def model_named(self, name: str | None) -> str:
        """The name to answer under; None asks for the model that there is.

        Raises:
            ApiError: 404, no such model.
        """
        names = self.model_names
        if name is None:
            return names[0]
        if name not in names:
            raise ApiError(
                f"there is no model {name!r:.200} here; this server has {', '.join(names)}",
                UNKNOWN_MODEL,
                param="model",
            )
        return name

    async def loaded(self) -> ServerInfo:
        """The same as `info`, once the pool has the tokenizer of that model."""
        info = self.info
        if info.tokenizer_digest != self._digest:
            files = await self.engine.tokenizer_files()
            if info.tokenizer_digest == self._digest:
                return info  # another call was quicker
            if files is not None:
                self.pool.set_files(files)
            self.chat_templates = {} if files is None else files.chat_templates
            self._digest = info.tokenizer_digest
        return info

    async def load_early(self) -> None:
        """Have the tokenizers made before the first call needs them."""
        with contextlib.suppress(ApiError, RequestError):  # then the first call does it
            await self.engine.wait_ready(EARLY_S)
            await self.loaded()

    async def encode(self, work: Callable[[Tokenizer | None], T], *, num_chars: int) -> T:
        """What `work` returns or raises, on a thread that has a tokenizer; None if there is none.

        Args:
            num_chars: of the text to encode, as far as known.
        """
        if not self._digest:
            return work(None)
        return await self.pool.run(work, num_chars=num_chars)

    def draw_id(self) -> str:
        """An id that no other call has, on any server."""
        return secrets.token_hex(12)

    def open_call(self, call_id: str, drafts: Sequence[Draft]) -> Call:
        """Submit the requests of one HTTP call. Whoever opens it closes it.

        Raises:
            InvalidRequest, EngineUnreachable, ...: none was submitted.
        """
        model, requests = self.model_names[0], submit_all(self.engine, drafts)
        return self._opened(Call(call_id, self.engine, requests, self._forget), model)

    def open_kept(self, kept: KeptCall) -> Call:
        """Read the requests of a call that outlives this one. Whoever opens it closes it."""

        def leave(call: Call) -> None:
            self._forget(call)
            self.kept.leave(kept)

        model = self.model_names[0]
        self.kept.enter(kept)
        call = Call(kept.call_id, self.engine, kept.requests, leave, is_kept=True)
        return self._opened(call, model)

    def _opened(self, call: Call, model: str) -> Call:
        note_call(call, model)
        self.calls[id(call)] = call
        return call

    def _forget(self, call: Call) -> None:
        del self.calls[id(call)]


def server_of(request: Request) -> ApiServer:
    server = request.app.state.server
    assert isinstance(server, ApiServer)
    return server
