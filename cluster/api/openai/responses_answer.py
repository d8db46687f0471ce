"""The answer to one call of `/v1/responses`, whole or as typed events."""

from collections.abc import Sequence

import msgspec
from pydantic import BaseModel

from cluster.api.calls import Call
from cluster.api.errors import ApiError
from cluster.api.openai.growth import Growth, OutputReader
from cluster.api.openai.item_ids import item_ids
from cluster.api.openai.responses_body import ResponsesBody
from cluster.api.openai.responses_output import Event, OutputItems
from cluster.api.openai.responses_shapes import (
    IncompleteDetails,
    InputTokensDetails,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
    Status,
)
from cluster.api.openai.token_logprobs import LogprobReader
from cluster.api.openai.tools.use import ToolUse
from cluster.api.openai.usage import usage_of
from cluster.api.position import Marks, Position

_ENCODER = msgspec.json.Encoder()


class ResponsesAnswer:
    """Reads the one output of a call."""

    def __init__(
        self,
        call: Call,
        body: ResponsesBody,
        *,
        created: int,
        model: str,
        tool_use: ToolUse | None,
        is_resumable: bool = False,
    ) -> None:
        self._call, self._body = call, body
        self._created, self._model = created, model
        (request,) = call.requests
        (output,) = request.outputs
        self._sampling = request.draft.sampling
        logprobs = None
        if body.wants_logprobs:
            logprobs = LogprobReader(
                output, request.draft, num_likeliest=body.top_logprobs or 0, keeps_all=False
            )
        self._reader = OutputReader(output, logprobs)
        parser = None if tool_use is None else tool_use.parser(item_ids(call.id, "calls"))
        self._items = OutputItems(parser, item_ids(call.id, "items"))
        self._marks = Marks(created, 1) if is_resumable else None
        self._has_begun = self._has_closed = False
        self._num_events = 0
        self._is_cut = False
        self._ahead = b""
        """Frames that are due before any others."""

    def growth(self) -> bytes:
        ahead, self._ahead = self._ahead, b""
        return ahead + self._grow(self._reader.read())

    def skip(self, position: Position) -> None:
        assert self._marks is not None
        (place,) = position.places
        if place is not None:
            self._grow(self._reader.read_to(place))
        self._num_events = position.num_events
        if position.split is not None:
            towards, num_there = position.split
            self._num_events -= num_there  # made again, and not sent
            self._ahead = self._grow(self._reader.read_to(towards), num_there)
        self._marks.check(position)
        self._has_closed = position.has_closing

    def _grow(self, growth: Growth | None, num_skipped: int = 0) -> bytes:
        """Frames of what the output gained, but for the first few."""
        before = "" if self._marks is None else self._marks.place
        events: list[Event] = []
        if not self._has_begun:
            self._has_begun = True
            if self._marks is not None:
                self._marks.begin(0)
            response = self._response("in_progress")
            events += (
                {"type": kind, "response": response}
                for kind in ("response.created", "response.in_progress")
            )
        if growth is not None:
            events += self._take(growth)
            if self._marks is not None:
                has_ended = growth.finish_reason is not None
                self._marks.advance(0, growth.token_ids, has_ended=has_ended)
        return b"".join(self._frames(events, before)[num_skipped:])

    def closing(self) -> bytes:
        if self._has_closed:
            return b""
        response = self._response(self._final_status)
        event: Event = {"type": f"response.{response.status}", "response": response}
        return b"".join(self._frames([event], suffix="-u"))

    def failing(self, error: ApiError) -> bytes:
        failure = ResponseFailure(code="server_error", message=str(error))
        response = self._response("failed", failure)
        return b"".join(self._frames([{"type": "response.failed", "response": response}]))

    def whole(self) -> ResponseObject:
        """The answer, once the output has ended."""
        growth = self._reader.read()
        assert growth is not None, "read twice"
        self._take(growth)
        return self._response(self._final_status)

    def _take(self, growth: Growth) -> list[Event]:
        events = self._items.grow(growth.text, growth.entries)
        if growth.finish_reason is not None:
            self._is_cut = growth.finish_reason == "length"
            events += self._items.end(is_cut=self._is_cut)
        return events

    @property
    def _final_status(self) -> Status:
        return "incomplete" if self._is_cut else "completed"

    def _frames(self, events: Sequence[Event], before: str = "", suffix: str = "") -> list[bytes]:
        """Numbered through the whole stream; each names its type twice, as the protocol has it.

        Args:
            before: the reader's place before these events.
            suffix: of the last one's id.
        """
        frames: list[bytes] = []
        marks, id_line = self._marks, b""
        for count, event in enumerate(events, 1):
            event["sequence_number"] = self._num_events
            self._num_events += 1
            if marks is not None and count == len(events):
                id_line = marks.line(f"-n{self._num_events}{suffix}")
            elif marks is not None:
                towards = f"-s{marks.place}p{count}-n{self._num_events}"
                id_line = marks.line(towards, place=before)
            data = _ENCODER.encode(event)
            frames.append(b"%bevent: %b\ndata: %b\n\n" % (id_line, _type_of(event), data))
        return frames

    def _response(self, status: Status, error: ResponseFailure | None = None) -> ResponseObject:
        body, is_over = self._body, status != "in_progress"
        return ResponseObject(
            id=self._call.id,
            created_at=self._created,
            status=status,
            error=error,
            incomplete_details=IncompleteDetails("max_output_tokens") if self._is_cut else None,
            output=self._items.closed if is_over else [],
            usage=self._usage() if is_over else None,
            model=self._model,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            top_logprobs=body.top_logprobs or 0,
            text={"format": _said(body.text and body.text.format) or {"type": "text"}},
            tools=[_said(tool) for tool in body.tools or ()],
            tool_choice=body.tool_choice
            if isinstance(body.tool_choice, str)
            else _said(body.tool_choice) or "auto",
            parallel_tool_calls=body.parallel_tool_calls is not False,
            metadata=body.metadata if isinstance(body.metadata, dict) else {},
            user=body.user if isinstance(body.user, str) else None,
        )

    def _usage(self) -> ResponseUsage:
        usage = usage_of(self._call)
        cached = usage.prompt_tokens_details.cached_tokens
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=cached),
            output_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
        )


def _type_of(event: Event) -> bytes:
    return str(event["type"]).encode()


def _said(part: BaseModel | None) -> dict[str, object]:
    """A part of the body as it was said, with what was left out as null."""
    return {} if part is None else part.model_dump(mode="json", by_alias=True)
