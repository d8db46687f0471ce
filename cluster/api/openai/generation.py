"""The steps that every call which makes text goes through, whatever its route."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from cluster.api.api_server import ApiServer, server_of
from cluster.api.calls import Call, submit_all, unless_left
from cluster.api.errors import bad_request
from cluster.api.exchange import label_of
from cluster.api.kept_calls import KeptCall
from cluster.api.openai.generation_body import GenerationBody
from cluster.api.openai.keyed import Keyed, keyed_of
from cluster.api.openai.prompts import Drafting, checked_num_kept
from cluster.api.openai.sampling import check_shared
from cluster.api.openai.structure import may_need_grammar, naming_structure
from cluster.api.openai.unknown_fields import refusal_of, unknown_fields, warning_of
from cluster.api.position import Position
from cluster.api.sse import Chunks, EventStream
from cluster.frontend.draft import Draft, RequestOptions
from cluster.frontend.tokenizer import Tokenizer
from cluster.frontend.tokenizer_pool import LONG_CHARS
from cluster.logs import EventLog
from cluster.messages.clients import ServerInfo
from scheduler.errors import InvalidRequest
from scheduler.sampling import SamplingParams

TIMEOUT_HEADER = "X-Request-Timeout"
WARNING_HEADER = "X-Stoker-Warning"

_log = EventLog("api")


class Answer(Chunks, Protocol):
    """What a route makes of a call."""

    def whole(self) -> Struct:
        """All of it, once all outputs have ended."""

    def skip(self, position: Position) -> None:
        """Go on from where a reader was who has left. Only before anything was read.

        Raises:
            ApiError: 410, what it had is not the beginning of this answer.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One call on its way to the engine."""

    server: ApiServer
    request: Request
    body: GenerationBody
    call_id: str
    created: int
    model: str
    """The name that was asked for."""
    info: ServerInfo
    headers: dict[str, str]
    """Of the answer."""
    keyed: Keyed | None
    """What makes it a call that can be come back to."""

    @property
    def is_resumable(self) -> bool:
        """Whether events of its stream have ids."""
        return self.keyed is not None

    def drafting(self, sampling: SamplingParams, *, num_prompts: int = 1) -> Drafting:
        """What its drafts have in common.

        Raises:
            InvalidRequest, ApiError: 400
        """
        body, config = self.body, self.server.config
        check_shared(body, sampling)
        if num_prompts * sampling.n > config.max_outputs_per_request:
            raise bad_request(
                f"{num_prompts} prompts with {sampling.n} outputs each make "
                f"{num_prompts * sampling.n} outputs, at most {config.max_outputs_per_request} may "
                "be in one call (max_outputs_per_request)",
                "n",
            )
        return Drafting(
            call_id=self.call_id,
            info=self.info,
            sampling=sampling,
            options=_options_of(self.request, body, self.call_id, config.default_timeout_s),
            draw_seed=self.server.engine.draw_seed if self.keyed is None else self.keyed.seeds(),
            num_kept=checked_num_kept(body.truncate_prompt_tokens),
        )

    async def call(
        self, work: Callable[[Tokenizer | None], Sequence[Draft]], *, num_chars: int
    ) -> Call:
        """Make the drafts on a thread of the pool, and submit them, unless that was done before.

        Raises:
            InvalidRequest, EngineUnreachable, ...: nothing was submitted.
        """
        server, keyed = self.server, self.keyed
        kept = None if keyed is None else server.kept.find(keyed.name)
        drafts = await self._drafts(work, num_chars) if kept is None else ()
        if keyed is None:
            call = server.open_call(self.call_id, drafts)
        else:
            kept = server.kept.find(keyed.name)  # another call may have been quicker
            if kept is None:
                kept = self._keep(keyed, drafts)
            keyed.check(kept)
            call = server.open_kept(kept)
        call.leave_with(self.request.receive)
        return call

    def _keep(self, keyed: Keyed, drafts: Sequence[Draft]) -> KeptCall:
        """Submit requests that outlive their first reader."""
        server = self.server
        requests = submit_all(server.engine, drafts)
        kept = KeptCall(keyed.name, self.call_id, keyed.fingerprint, self.created, requests)
        server.kept.keep(kept)
        return kept

    async def _drafts(
        self, work: Callable[[Tokenizer | None], Sequence[Draft]], num_chars: int
    ) -> Sequence[Draft]:
        if may_need_grammar(self.body):
            num_chars += LONG_CHARS  # it must not take the last thread from plain calls
        with naming_structure(self.body):
            encoding = self.server.encode(work, num_chars=num_chars)
            if num_chars < LONG_CHARS:
                return await encoding
            return await unless_left(self.request.receive, encoding)

    async def answer(self, call: Call, answer: Answer) -> Response:
        """The response, whole or as a stream. The call is closed when it is out.

        Raises:
            Exception: why there is none. A stream that has begun says so in an event instead.
        """
        if self.body.wants_stream:
            position = None if self.keyed is None else self.keyed.position
            try:
                if position is None:
                    await call.begin()
                else:
                    await call.reach(position)
                    answer.skip(position)
            except BaseException:
                call.close()
                raise
            return EventStream(call, answer, self.headers)
        try:
            await call.finish()
            body = msgspec.json.encode(answer.whole())
        finally:
            call.close()
        return Response(body, headers=self.headers, media_type="application/json")


async def begin_generation(request: Request, body: GenerationBody, prefix: str) -> Generation:
    """Check what does not depend on the route, and wait until the tokenizer is here.

    Args:
        prefix: what the call's id begins with.
    Raises:
        ApiError: 400 for a field, 404 for the model, 503 for an engine that is not ready.
    """
    server = server_of(request)
    info = await server.loaded()
    model = server.model_named(body.model)
    keyed = await keyed_of(request, wants_stream=body.wants_stream)
    kept = None if keyed is None else server.kept.find(keyed.name)
    created = server.now()
    if keyed is not None and keyed.position is not None:
        created = keyed.position.created
    if keyed is not None and kept is not None:
        keyed.check(kept)
        created = kept.created
    return Generation(
        server=server,
        request=request,
        body=body,
        call_id=prefix + (server.draw_id() if keyed is None else keyed.digest[:24]),
        created=created,
        model=model,
        info=info,
        headers=_warnings(server, body),
        keyed=keyed,
    )


def _warnings(server: ApiServer, body: GenerationBody) -> dict[str, str]:
    unknown = unknown_fields(body)
    if not unknown:
        return {}
    if server.config.unknown_fields == "refuse":
        raise refusal_of(body, unknown)
    warning = warning_of(body, unknown)
    _log.warning("unknown_fields", fields=",".join(unknown)[:200])
    return {WARNING_HEADER: warning}


def _options_of(
    request: Request, body: GenerationBody, call_id: str, default_timeout_s: float | None
) -> RequestOptions:
    timeout_s, place = body.timeout, "timeout"
    told = request.headers.get(TIMEOUT_HEADER)
    if timeout_s is None and told is not None:
        place = TIMEOUT_HEADER
        try:
            timeout_s = float(told)
        except ValueError:
            raise bad_request(
                f"{place} must be a number of seconds above 0, got {told!r:.80}", place
            ) from None
    try:
        return RequestOptions(
            priority=0 if body.priority is None else body.priority,
            cache_salt=body.cache_salt,
            timeout_s=default_timeout_s if timeout_s is None else timeout_s,
            request_id=label_of(call_id),
        )
    except InvalidRequest as error:
        if error.param != "timeout_s":
            raise
        raise bad_request(str(error).replace("timeout_s", place, 1), place) from error
