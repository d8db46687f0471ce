"""Log-probabilities of the tokens whose text is out, for both routes.

An output's tokens include some that add nothing to its text: an end token, special tokens
that are skipped, the tokens of a stop text that was trimmed. Callers join the tokens and
expect the text, so those have no entry, unless every token is asked for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cluster.frontend.detokenizer import Detokenizer
from cluster.frontend.draft import Draft
from cluster.frontend.requests import LiveOutput, LiveRequest, TokenLogprobs

LEAST_LOGPROB = -9999.0
"""Shown for a token that cannot be: JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token that is, or could have been, at a position."""

    token_id: int
    piece: bytes
    """Exactly what it adds; maybe a part of a character."""
    logprob: float
    rank: int

    @property
    def text(self) -> str:
        """For people: a part of a character becomes U+FFFD."""
        return self.piece.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One position of a text."""

    offset: int
    """Characters of the text before it."""
    token: ShownToken
    likeliest: Sequence[ShownToken]
    """As many as asked for, in falling order."""
    is_known: bool = True
    """False for the first token of a prompt, which nothing predicts."""


class LogprobReader:
    """Gives out the entries of one output as its text grows."""

    def __init__(
        self,
        output: LiveOutput,
        draft: Draft,
        *,
        num_likeliest: int,
        keeps_all: bool,
        first_offset: int = 0,
    ) -> None:
        """
        Args:
            keeps_all: an entry for each token, also for those that add no text.
            first_offset: where the output begins in the text that is shown.
        """
        self._output = output
        self._num_likeliest = num_likeliest
        self._piece_of = pieces_of(draft)
        self._keeps_all = keeps_all or draft.tokenizer is None
        self._skipped: frozenset[int] = frozenset()
        if draft.tokenizer is not None and draft.sampling.skip_special_tokens:
            self._skipped = draft.tokenizer.special_ids
        self._offsets = _Offsets(draft, skip_special_tokens=draft.sampling.skip_special_tokens)
        self._is_exact = draft.tokenizer is None or draft.tokenizer.joins_bytes
        self._first_offset = first_offset
        self._num_taken = 0

    def take(self, num_chars: int, num_tokens: int) -> list[TokenEntry]:
        """Entries not given yet of those among the first `num_tokens` tokens that begin within
        the first `num_chars` characters."""
        entries: list[TokenEntry] = []
        output = self._output
        while self._num_taken < num_tokens:
            token_id = output.token_ids[self._num_taken]
            is_text = token_id not in self._skipped and self._offsets.here < num_chars
            if not is_text and not self._keeps_all and token_id not in self._skipped:
                break
            offset = self._offsets.here
            added = self._offsets.pass_over(token_id)
            if not output.is_live and self._num_taken == len(output.token_ids) - 1:
                added += self._offsets.rest()
            if is_text or self._keeps_all:
                entries.append(self._entry(self._num_taken, offset, added))
            self._num_taken += 1
        return entries

    def _entry(self, index: int, offset: int, added: str) -> TokenEntry:
        row = self._output.logprobs[index]
        assert row is not None, "asked for with the request"
        entry = entry_of(row, self._first_offset + offset, self._piece_of, self._num_likeliest)
        piece, text = entry.token.piece, added.encode()
        may_lose_space = offset == 0 and (text or not piece.strip(b" "))
        if self._is_exact and not (may_lose_space and piece.endswith(text)):
            return entry
        # What a token adds depends on its place: decoders take a space from the text's start.
        return replace(entry, token=replace(entry.token, piece=text))


def prompt_entries(request: LiveRequest, num_likeliest: int) -> list[TokenEntry]:
    """One entry for each token of the prompt, special ones included.

    If the tokenizer put a begin token before the text, that stands at its first character.
    """
    draft, piece_of = request.draft, pieces_of(request.draft)
    offsets = _Offsets(draft, skip_special_tokens=False)
    found: list[tuple[int, int]] = []
    for token_id in draft.prompt_token_ids:
        found.append((token_id, offsets.here))
        offsets.pass_over(token_id)
    num_before = 0 if draft.prompt is None else max(0, offsets.here - len(draft.prompt))
    entries: list[TokenEntry] = []
    for position, (token_id, at) in enumerate(found):
        offset = max(0, at - num_before)
        row = request.prompt_logprobs.get(position)
        if row is None:
            token = ShownToken(token_id, piece_of(token_id), 0.0, 0)
            entries.append(TokenEntry(offset, token, (), is_known=False))
        else:
            entries.append(entry_of(row, offset, piece_of, num_likeliest))
    return entries


def entry_of(
    row: TokenLogprobs, offset: int, piece_of: Callable[[int], bytes], num_likeliest: int
) -> TokenEntry:
    shown = [
        ShownToken(token_id, piece_of(token_id), max(logprob, LEAST_LOGPROB), rank)
        for token_id, logprob, rank in zip(
            row.token_ids[: num_likeliest + 1], row.logprobs, row.ranks, strict=False
        )
    ]
    return TokenEntry(offset, shown[0], shown[1:])


def pieces_of(draft: Draft) -> Callable[[int], bytes]:
    """The bytes of a token; of a model without tokenizer, its number."""
    if draft.tokenizer is None:
        return lambda token_id: f"token_id:{token_id}".encode()
    return draft.tokenizer.token_bytes


class _Offsets:
    """At which character of a text each of its tokens begins."""

    def __init__(self, draft: Draft, *, skip_special_tokens: bool) -> None:
        self.here = 0
        self._detokenizer: Detokenizer | None = None
        if draft.tokenizer is not None:
            self._detokenizer = draft.tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)

    def pass_over(self, token_id: int) -> str:
        """The text that the token makes certain."""
        added = "" if self._detokenizer is None else self._detokenizer.feed((token_id,))
        self.here += len(added)
        return added

    def rest(self) -> str:
        """What was held back, once no token follows."""
        return "" if self._detokenizer is None else self._detokenizer.flush()
