"""Token ids to text as they come, whole characters only.

For every split of the ids into pieces, the joined texts are what decoding all ids at once
gives, also where the bytes are broken. Nothing here raises on any sequence of ids: broken
bytes become U+FFFD, each where it is known that it can never become a character.
"""

import codecs
from collections.abc import Callable, Sequence

from cluster.frontend.token_pieces import DecoderKind, TokenPieces

Decode = Callable[[Sequence[int]], str]
"""Ids to text in one go, with special tokens already left out."""


class Detokenizer:
    """Text of one output. A token costs a dictionary look-up and a short decode.

    Made by `Tokenizer.detokenizer`. Not for several threads at once.
    """

    def __init__(self, pieces: TokenPieces, decode: Decode, *, skip_special_tokens: bool) -> None:
        self._skipped = pieces.special_ids if skip_special_tokens else frozenset()
        self._text: _ByteLevelText | _ByteFallbackText | _WindowText
        if pieces.kind is DecoderKind.BYTE_LEVEL:
            self._text = _ByteLevelText(pieces)
        elif pieces.kind is DecoderKind.BYTE_FALLBACK:
            self._text = _ByteFallbackText(pieces)
        else:
            self._text = _WindowText(decode)
        self._ended = False

    def feed_one(self, token_id: int) -> str:
        """The text that this id completes: `feed`, for one."""
        assert not self._ended, "fed after flush"
        return "" if token_id in self._skipped else self._text.add(token_id)

    def feed(self, ids: Sequence[int]) -> str:
        """The text that these ids complete; text that may still change is held back."""
        assert not self._ended, "fed after flush"
        skipped, add = self._skipped, self._text.add
        return "".join([add(token_id) for token_id in ids if token_id not in skipped])

    def flush(self) -> str:
        """What was held back, with U+FFFD for bytes that never became a character."""
        self._ended = True
        return self._text.end()


class _ByteLevelText:
    """One stream of UTF-8 bytes, whatever the token borders."""

    def __init__(self, pieces: TokenPieces) -> None:
        self._bytes_of, self._whole_text_of = pieces.bytes_of, pieces.whole_text_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._has_part = False
        """Whether bytes of a character are waiting for others."""

    def add(self, token_id: int) -> str:
        if not self._has_part and (whole := self._whole_text_of(token_id)) is not None:
            return whole
        text = self._decoder.decode(self._bytes_of(token_id))
        self._has_part = self._decoder.getstate()[0] != b""
        return text

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


class _ByteFallbackText:
    """Text tokens, and runs of byte tokens between them.

    A run is one unit to these tokenizers: if any of it is not UTF-8, every byte of it
    becomes U+FFFD. So a run is held until the token after it.
    """

    def __init__(self, pieces: TokenPieces) -> None:
        self._pieces = pieces
        self._run = bytearray()
        self._num_to_strip = pieces.num_stripped

    def add(self, token_id: int) -> str:
        piece = self._pieces.bytes_of(token_id)
        if not piece:
            return ""  # not in the vocabulary: as if it were not there
        if token_id in self._pieces.byte_by_id:
            self._run += piece
            return ""
        return self._end_run() + self._strip(piece.decode())

    def end(self) -> str:
        return self._end_run()

    def _end_run(self) -> str:
        if not self._run:
            return ""
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            text = "\ufffd" * len(self._run)
        self._run.clear()
        return self._strip(text)

    def _strip(self, text: str) -> str:
        while self._num_to_strip and text:
            if text[0] != " ":
                self._num_to_strip = 0
                break
            self._num_to_strip -= 1
            text = text[1:]
        return text


class _WindowText:
    """For decoders that we do not know: decode a short window again with each token.

    The window begins with ids whose text is out already, so that what a decoder does to the
    start of a text happens outside of what is new. It moves on whenever it ends in a whole
    character. A window of `_LONGEST_WINDOW` ids without one is no text, and moves on too.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_out = 0  # ids of the window whose text is out
        self._out = ""  # their text within the window

    def add(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        grown = len(text) > len(self._out) and not text.endswith("\ufffd")
        if not grown and len(self._window) < _LONGEST_WINDOW:
            return ""
        return self._emit(text)

    def end(self) -> str:
        return self._emit(self._decode(self._window)) if self._window else ""

    def _emit(self, text: str) -> str:
        new = text[len(self._out) :]
        del self._window[: self._num_out]
        self._num_out = len(self._window)
        self._out = self._decode(self._window)
        return new


_LONGEST_WINDOW = 256
