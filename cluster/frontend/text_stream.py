"""The text of one output as it grows, and where a stop string ends it."""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.frontend.detokenizer import Detokenizer
from cluster.frontend.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What some more tokens of an output add to it."""

    text: str
    num_tokens: int
    """How many of the ids fed belong to the output: all, or up to the one that completes a
    stop string. The rest were computed for nothing."""
    stopped_by: str | None = None
    """The stop string that ended the output."""


class TextStream:
    """Token ids of one output in, text that is certain out.

    Once `stopped_by` is set the output is over: the owner aborts the request, and whatever
    tokens were on their way add nothing. Made by `Tokenizer.text_stream`.
    """

    def __init__(
        self, detokenizer: Detokenizer, stop_strings: StopStrings, *, min_tokens: int = 0
    ) -> None:
        """Stop strings that are complete within the first `min_tokens` tokens do not stop."""
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._min_tokens = min_tokens
        self.num_tokens = 0
        """Tokens that belong to the output so far."""
        self.num_chars = 0
        """Characters given out so far."""

    @property
    def plain(self) -> Detokenizer | None:
        """Where there are no stop strings, all text is certain as it comes: whoever asks for no
        counts may feed this instead, which is cheaper, and `flush` as ever."""
        return None if self._stop_strings.any else self._detokenizer

    @property
    def stopped_by(self) -> str | None:
        return self._stop_strings.matched

    def feed(self, ids: Sequence[int]) -> TextDelta:
        """The text that these ids make certain; after a stop string, nothing."""
        if not self._stop_strings.any:
            self.num_tokens += len(ids)
            return self._delta([self._detokenizer.feed(ids)], len(ids))
        texts: list[str] = []
        num_before = self.num_tokens
        for token_id in ids:
            if self.stopped_by is not None:
                break
            self.num_tokens += 1
            new = self._detokenizer.feed((token_id,))
            if new:
                texts.append(self._search(new))
        return self._delta(texts, self.num_tokens - num_before)

    def flush(self) -> TextDelta:
        """The rest of an output that ended by itself: text held back until now.

        A broken character may become text only here, and may complete a stop string.
        """
        if self.stopped_by is not None:
            return self._delta([], 0)
        texts = [self._search(self._detokenizer.flush())]
        if self.stopped_by is None:
            texts.append(self._stop_strings.flush())
        return self._delta(texts, 0)

    def _search(self, text: str) -> str:
        return self._stop_strings.feed(text, may_stop=self.num_tokens >= self._min_tokens)

    def _delta(self, texts: list[str], num_tokens: int) -> TextDelta:
        text = "".join(texts)
        self.num_chars += len(text)
        return TextDelta(text=text, num_tokens=num_tokens, stopped_by=self.stopped_by)
