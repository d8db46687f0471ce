"""The answer to one call of `/v1/completions`, whole or in chunks."""

from msgspec import UNSET

from cluster.api.calls import Call
from cluster.api.errors import ApiError
from cluster.api.openai.chunk_frame import ChunkFrame
from cluster.api.openai.completion_body import CompletionBody
from cluster.api.openai.completion_shapes import (
    Completion,
    CompletionChoice,
    completion_logprobs,
    prompt_logprobs,
)
from cluster.api.openai.growth import Growth, OutputReader
from cluster.api.openai.sampling import is_scoring
from cluster.api.openai.token_logprobs import LogprobReader, TokenEntry, prompt_entries
from cluster.api.openai.usage import usage_of
from cluster.api.position import Marks, Place, Position
from cluster.frontend.requests import LiveOutput, LiveRequest


class CompletionAnswer:
    """Reads the outputs of a call. Output j of prompt i has index i * n + j."""

    def __init__(
        self,
        call: Call,
        body: CompletionBody,
        *,
        created: int,
        model: str,
        is_resumable: bool = False,
    ) -> None:
        self._call, self._body = call, body
        self._created, self._model = created, model
        self._is_scoring = is_scoring(body)
        self._readers = [
            _ChoiceReader(request, output, body, is_scoring=self._is_scoring)
            for request in call.requests
            for output in request.outputs
        ]
        self._marks = Marks(created, len(self._readers)) if is_resumable else None
        self._frame = ChunkFrame(
            call, body, kind="text_completion", created=created, model=model, marks=self._marks
        )

    def growth(self) -> bytes:
        events: list[bytes] = []
        for i, reader in enumerate(self._readers):
            growth = reader.growth()
            if growth is None:
                continue
            if self._marks is not None:
                has_ended = growth.finish_reason is not None
                self._marks.advance(i, growth.token_ids, has_ended=has_ended)
            choice = reader.choice(i, growth, is_whole=False)
            if choice is not None:
                events.append(self._frame.event(choice))
        return b"".join(events)

    def skip(self, position: Position) -> None:
        assert self._marks is not None
        for i, (reader, place) in enumerate(zip(self._readers, position.places, strict=True)):
            if place is not None:
                growth = reader.growth_to(place)
                self._marks.advance(i, growth.token_ids, has_ended=place.has_ended)
                reader.choice(i, growth, is_whole=False)
        self._marks.check(position)
        self._frame.skip(position)

    def closing(self) -> bytes:
        return self._frame.closing(is_scoring=self._is_scoring)

    def failing(self, error: ApiError) -> bytes:
        return self._frame.failing(error)

    def whole(self) -> Completion:
        """The answer, once all outputs have ended."""
        chosen = [
            output.handle for request in self._call.requests for output in self._best(request)
        ]
        readers = {reader.output.handle: reader for reader in self._readers}
        choices = [readers[handle].whole(i) for i, handle in enumerate(chosen)]
        return Completion(
            id=self._call.id,
            created=self._created,
            model=self._model,
            choices=[choice for choice in choices if choice is not None],
            usage=usage_of(self._call, is_scoring=self._is_scoring),
        )

    def _best(self, request: LiveRequest) -> list[LiveOutput]:
        """The `n` outputs with the highest log-probability per token, best first."""
        num_wanted = self._body.n or 1
        if self._body.best_of is None or num_wanted == len(request.outputs):
            return request.outputs
        return sorted(request.outputs, key=_mean_logprob, reverse=True)[:num_wanted]


def _mean_logprob(output: LiveOutput) -> float:
    """Per token, as OpenAI compares outputs of unequal length."""
    values = [row.logprobs[0] for row in output.logprobs if row is not None]
    return sum(values) / max(1, len(values))


class _ChoiceReader:
    """One output as a choice, with its prompt before it where that is echoed."""

    def __init__(
        self, request: LiveRequest, output: LiveOutput, body: CompletionBody, *, is_scoring: bool
    ) -> None:
        self._request, self.output, self._body = request, output, body
        self._is_scoring = is_scoring
        self._echo = _echoed(request) if body.echo else ""
        self._has_begun = False
        logprobs: LogprobReader | None = None
        if body.logprobs is not None:
            logprobs = LogprobReader(
                output,
                request.draft,
                num_likeliest=body.logprobs,
                keeps_all=bool(body.return_token_ids),
                first_offset=len(self._echo),
            )
        self._reader = OutputReader(output, logprobs)

    def growth(self) -> Growth | None:
        """What the output gained."""
        return self._reader.read()

    def growth_to(self, place: Place) -> Growth:
        return self._reader.read_to(place)

    def whole(self, index: int) -> CompletionChoice | None:
        growth = self.growth()
        assert growth is not None, "read twice"
        return self.choice(index, growth, is_whole=True)

    def choice(self, index: int, growth: Growth, *, is_whole: bool) -> CompletionChoice | None:
        """The choice, or what it gained; None if there is nothing to tell."""
        if self._is_scoring:
            growth = _without_output(growth)
        if not self._shows(growth):
            return None
        is_first, self._has_begun = not self._has_begun, True
        body, shows_ids = self._body, bool(self._body.return_token_ids)
        entries, by_prompt = growth.entries, body.prompt_logprobs
        if entries is not None and is_first and body.echo:
            entries = [*prompt_entries(self._request, body.logprobs or 0), *entries]
        return CompletionChoice(
            index=index,
            text=self._echo + growth.text if is_first else growth.text,
            logprobs=None if entries is None else completion_logprobs(entries),
            finish_reason=growth.finish_reason,
            stop_reason=growth.stop_reason,
            prompt_logprobs=UNSET
            if by_prompt is None or not is_whole
            else prompt_logprobs(prompt_entries(self._request, by_prompt)),
            token_ids=growth.token_ids if shows_ids else UNSET,
            prompt_token_ids=self._request.draft.prompt_token_ids
            if shows_ids and is_first
            else UNSET,
        )

    def _shows(self, growth: Growth) -> bool:
        if growth.is_visible or (self._body.return_token_ids and growth.token_ids):
            return True
        return bool(self._echo) and not self._has_begun


def _echoed(request: LiveRequest) -> str:
    """The prompt as text: as it came, or what its ids stand for."""
    draft = request.draft
    if draft.prompt is not None:
        return draft.prompt
    if draft.tokenizer is None:
        return ""
    return draft.tokenizer.decode(draft.prompt_token_ids, skip_special_tokens=False)


def _without_output(growth: Growth) -> Growth:
    """Of a prompt that is only scored; the engine ends such a request after one token."""
    entries: list[TokenEntry] | None = None if growth.entries is None else []
    return Growth("", [], entries, "length" if growth.finish_reason else None, None)
