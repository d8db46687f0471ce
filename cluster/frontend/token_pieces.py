"""What each token adds to the text, as exact bytes.

A tokenizer's decoder says how token names become text. Three kinds matter here: byte-level
(GPT-2, Llama 3, Qwen, SmolLM2: each letter of a name stands for one byte), byte-fallback
(Llama 2, TinyLlama, Mistral: a "▁" is a space and a name like `<0xE4>` is one byte), and
every other, which only the tokenizer itself can decode.
"""

import json
from enum import Enum

from tokenizers import Tokenizer as RawTokenizer


class DecoderKind(Enum):
    BYTE_LEVEL = "byte_level"
    BYTE_FALLBACK = "byte_fallback"
    OTHER = "other"


class TokenPieces:
    """The bytes of each token of one tokenizer, computed when first asked for.

    Any thread may ask: two that ask for the same id at once compute the same value.
    """

    def __init__(self, raw: RawTokenizer) -> None:
        self._raw = raw
        shape = _DecoderShape.of(raw)
        self.kind = shape.kind
        self.num_stripped = shape.num_stripped
        """Leading spaces that decoding takes from the start of the whole text."""
        added = raw.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        names = {raw.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
        is_fallback = self.kind is DecoderKind.BYTE_FALLBACK
        self.byte_by_id = {i: byte for i, byte in names.items() if i is not None and is_fallback}
        """Tokens that are one raw byte, like `<0xE4>`, of a byte-fallback tokenizer."""
        self._bytes_by_id: dict[int, bytes] = {}
        self._whole_text_by_id: dict[int, str | None] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for an id outside the vocabulary."""
        piece = self._bytes_by_id.get(token_id)
        if piece is None:
            piece = self._bytes_by_id[token_id] = self._compute(token_id)
        return piece

    def whole_text_of(self, token_id: int) -> str | None:
        """The text of a token whose bytes are whole characters; None for any other."""
        try:
            return self._whole_text_by_id[token_id]
        except KeyError:
            pass
        try:
            text: str | None = self.bytes_of(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self._whole_text_by_id[token_id] = text
        return text

    def _compute(self, token_id: int) -> bytes:
        if token_id in self.byte_by_id:
            return bytes([self.byte_by_id[token_id]])
        name = self._raw.id_to_token(token_id) if 0 <= token_id <= LARGEST_ID else None
        if name is None:
            return b""
        if self.kind is DecoderKind.BYTE_LEVEL:
            return _byte_level_bytes(name)
        if self.kind is DecoderKind.BYTE_FALLBACK:
            return name.replace("▁", " ").encode()
        return self._raw.decode([token_id], skip_special_tokens=False).encode()


class _DecoderShape:
    """Which kind of decoder the tokenizer has, read from its own description."""

    def __init__(self, kind: DecoderKind, num_stripped: int = 0) -> None:
        self.kind = kind
        self.num_stripped = num_stripped

    @classmethod
    def of(cls, raw: RawTokenizer) -> "_DecoderShape":
        if raw.decoder is None:
            return cls(DecoderKind.OTHER)
        description: dict[str, object] = json.loads(raw.decoder.__getstate__())
        steps = description.get("decoders", [description])
        assert isinstance(steps, list)
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(DecoderKind.BYTE_LEVEL)
        if kinds[:3] != ["Replace", "ByteFallback", "Fuse"]:
            return cls(DecoderKind.OTHER)
        if steps[0]["pattern"] != {"String": "▁"} or steps[0]["content"] != " ":
            return cls(DecoderKind.OTHER)
        if len(steps) == 3:
            return cls(DecoderKind.BYTE_FALLBACK)
        strip = steps[3]
        if kinds[3:] == ["Strip"] and strip["content"] == " " and strip["stop"] == 0:
            return cls(DecoderKind.BYTE_FALLBACK, strip["start"])
        return cls(DecoderKind.OTHER)


def _byte_by_letter() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 letters stand for themselves, the other 68 byte
    values for the letters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_BY_LETTER = _byte_by_letter()
LARGEST_ID = 2**32 - 1
"""The tokenizers library raises on larger ids."""


def _byte_level_bytes(name: str) -> bytes:
    """Added tokens may hold letters outside the alphabet; such a name is its own text."""
    try:
        return bytes([_BYTE_BY_LETTER[letter] for letter in name])
    except KeyError:
        return name.encode()
