"""What one output gained since it was last read.

A whole answer is one growth from nothing to the end, so streams and whole answers agree by
construction.
"""

from dataclasses import dataclass
from typing import Literal

from cluster.api.openai.token_logprobs import LogprobReader, TokenEntry
from cluster.api.position import Place
from cluster.frontend.requests import LiveOutput
from scheduler.request import Finish

_FINISH_REASONS: dict[Finish, Literal["stop", "length"]] = {
    Finish.STOP: "stop",
    Finish.LENGTH: "length",
}
"""Ends that are answers. The others are errors, see `Call.failure`."""


@dataclass(frozen=True, slots=True)
class Growth:
    """News of one output."""

    text: str
    token_ids: list[int]
    entries: list[TokenEntry] | None
    """Log-probabilities, if asked for."""
    finish_reason: Literal["stop", "length"] | None
    """stop or length, at the end."""
    stop_reason: int | str | None

    @property
    def is_visible(self) -> bool:
        """Whether a reader who did not ask for tokens sees any of it."""
        return bool(self.text or self.entries) or self.finish_reason is not None


class OutputReader:
    """Reads one output as it grows."""

    def __init__(self, output: LiveOutput, logprobs: LogprobReader | None) -> None:
        self.output = output
        self._logprobs = logprobs
        self._num_texts = 0
        self._num_tokens = 0
        self._num_chars = 0
        self._is_over = False

    def read(self) -> Growth | None:
        """None if there are no news."""
        output = self.output
        finish_reason = _FINISH_REASONS.get(output.finish)
        ends = finish_reason is not None and not self._is_over
        num_tokens = len(output.token_ids)
        if not ends and num_tokens == self._num_tokens and len(output.texts) == self._num_texts:
            return None
        return self._read(num_tokens, len(output.texts), finish_reason if ends else None)

    def read_to(self, place: Place) -> Growth:
        """The news up to a place that the output has reached, as they were when it was there."""
        num_tokens, output = place.num_tokens, self.output
        if not place.has_ended:
            return self._read(num_tokens, num_tokens, None)
        return self._read(num_tokens, len(output.texts), _FINISH_REASONS.get(output.finish))

    def _read(
        self, num_tokens: int, num_texts: int, finish_reason: Literal["stop", "length"] | None
    ) -> Growth:
        output = self.output
        text = "".join(output.texts[self._num_texts : num_texts])
        token_ids = output.token_ids[self._num_tokens : num_tokens]
        self._num_texts, self._num_tokens = num_texts, num_tokens
        self._num_chars += len(text)
        self._is_over = self._is_over or finish_reason is not None
        logprobs = self._logprobs
        entries = None if logprobs is None else logprobs.take(self._num_chars, num_tokens)
        return Growth(text, token_ids, entries, finish_reason, output.stop_reason)
