"""The answer to one call of `/v1/chat/completions`, whole or in chunks."""

from collections.abc import Iterator

from msgspec import UNSET

from cluster.api.calls import Call
from cluster.api.errors import ApiError
from cluster.api.openai.chat_body import ChatBody
from cluster.api.openai.chat_shapes import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    FinishReason,
    chat_logprobs,
    tool_call,
    tool_call_delta,
)
from cluster.api.openai.chunk_frame import ChunkFrame
from cluster.api.openai.completion_shapes import prompt_logprobs
from cluster.api.openai.growth import Growth, OutputReader
from cluster.api.openai.item_ids import item_ids
from cluster.api.openai.token_logprobs import LogprobReader, prompt_entries
from cluster.api.openai.tools.growth import AnswerGrowth, growth_of
from cluster.api.openai.tools.use import ToolUse
from cluster.api.openai.usage import usage_of
from cluster.api.position import Marks, Position
from cluster.frontend.requests import LiveOutput


class ChatAnswer:
    """Reads the outputs of a call, which has one prompt."""

    def __init__(
        self,
        call: Call,
        body: ChatBody,
        *,
        created: int,
        model: str,
        tool_use: ToolUse | None = None,
        is_resumable: bool = False,
    ) -> None:
        self._call, self._body = call, body
        self._created, self._model = created, model
        (self._request,) = call.requests
        self._readers = [
            OutputReader(output, self._logprobs(output)) for output in self._request.outputs
        ]
        self._parsers = [
            None if tool_use is None else tool_use.parser(item_ids(call.id, f"calls of {index}"))
            for index in range(len(self._readers))
        ]
        self._has_begun = [False] * len(self._readers)
        self._marks = Marks(created, len(self._readers)) if is_resumable else None
        self._frame = ChunkFrame(
            call,
            body,
            kind="chat.completion.chunk",
            created=created,
            model=model,
            marks=self._marks,
        )

    def skip(self, position: Position) -> None:
        assert self._marks is not None
        for index, place in enumerate(position.places):
            if place is not None:
                self._has_begun[index] = True
                self._marks.begin(index)
                list(self._chunks(index, self._readers[index].read_to(place)))
        self._marks.check(position)
        self._frame.skip(position)

    def growth(self) -> bytes:
        events: list[bytes] = []
        for index, reader in enumerate(self._readers):
            growth = reader.read()
            if growth is not None:
                events += map(self._frame.event, self._chunks(index, growth))
        return b"".join(events)

    def closing(self) -> bytes:
        return self._frame.closing()

    def failing(self, error: ApiError) -> bytes:
        return self._frame.failing(error)

    def whole(self) -> ChatCompletion:
        """The answer, once all outputs have ended."""
        body = self._body
        choices: list[ChatChoice] = []
        for index, reader in enumerate(self._readers):
            growth = reader.read()
            assert growth is not None, "read twice"
            choices.append(self._choice(index, growth))
        return ChatCompletion(
            id=self._call.id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage_of(self._call),
            prompt_logprobs=UNSET
            if body.prompt_logprobs is None
            else prompt_logprobs(prompt_entries(self._request, body.prompt_logprobs)),
            prompt_token_ids=self._request.draft.prompt_token_ids
            if body.return_token_ids
            else UNSET,
        )

    def _choice(self, index: int, growth: Growth) -> ChatChoice:
        said = self._said(index, growth)
        finish_reason = self._finish_reason(index, growth)
        assert finish_reason is not None
        return ChatChoice(
            index=index,
            message=ChatMessage(
                content=said.content or None if said.calls else said.content,
                tool_calls=[tool_call(call) for call in said.calls] or UNSET,
            ),
            logprobs=None if growth.entries is None else chat_logprobs(growth.entries),
            finish_reason=finish_reason,
            stop_reason=growth.stop_reason,
            token_ids=growth.token_ids if self._body.return_token_ids else UNSET,
        )

    def _chunks(self, index: int, growth: Growth) -> Iterator[ChatChunkChoice]:
        shows_ids = bool(self._body.return_token_ids)
        if not self._has_begun[index]:
            self._has_begun[index] = True
            if self._marks is not None:
                self._marks.begin(index)
            yield ChatChunkChoice(
                index=index,
                delta=ChatDelta(role="assistant", content=""),
                prompt_token_ids=self._request.draft.prompt_token_ids if shows_ids else UNSET,
            )
        if self._marks is not None:
            has_ended = growth.finish_reason is not None
            self._marks.advance(index, growth.token_ids, has_ended=has_ended)
        said = self._said(index, growth)
        is_visible = said.content or said.calls or growth.entries or growth.finish_reason
        if not is_visible and not shows_ids:
            return
        yield ChatChunkChoice(
            index=index,
            delta=ChatDelta(
                content=said.content or UNSET,
                tool_calls=[tool_call_delta(call) for call in said.calls] or UNSET,
            ),
            logprobs=None if growth.entries is None else chat_logprobs(growth.entries),
            finish_reason=self._finish_reason(index, growth),
            stop_reason=growth.stop_reason if growth.finish_reason else UNSET,
            token_ids=growth.token_ids if shows_ids else UNSET,
        )

    def _said(self, index: int, growth: Growth) -> AnswerGrowth:
        """Content and calls of what an output gained."""
        parser = self._parsers[index]
        if parser is None:
            return AnswerGrowth(growth.text, [])
        events = parser.feed(growth.text)
        return growth_of([*events, *parser.flush()] if growth.finish_reason else events)

    def _finish_reason(self, index: int, growth: Growth) -> FinishReason | None:
        """After `_said`. A call that was cut is an answer that was cut."""
        parser = self._parsers[index]
        if growth.finish_reason == "stop" and parser is not None and parser.num_calls:
            return "tool_calls"
        return growth.finish_reason

    def _logprobs(self, output: LiveOutput) -> LogprobReader | None:
        if not self._body.logprobs:
            return None
        return LogprobReader(
            output,
            self._request.draft,
            num_likeliest=self._body.top_logprobs or 0,
            keeps_all=bool(self._body.return_token_ids),
        )
