"""Keeps control tokens that people type apart from the ones that a chat template writes.

A message may hold the text "<|im_end|>". Read as a control token it would end the turn, and
what follows could pose as another speaker. So before rendering, such texts in messages are
put between two marks; afterwards the text between marks is encoded as plain text, exactly
as if the tokenizer did not know the token, and everything else as usual.

Marks are Unicode noncharacters (reserved for internal use, never text): U+FDD0 and U+FDD1
around typed tokens, U+FDD2 before written ones. In messages that hold control tokens they
are dropped.
"""

import json
import re
import threading
from collections.abc import Callable, Iterable, Sequence

from tokenizers import Tokenizer as RawTokenizer

from cluster.frontend.chat_messages import Json, Message
from cluster.frontend.raw_tokenizer import encoding_of
from scheduler.errors import InvalidRequest

_OPEN, _CLOSE, _WRITTEN = "\ufdd0", "\ufdd1", "\ufdd2"
_MARKS = re.compile("[\ufdd0-\ufdef]")


class ControlTokens:
    """The added tokens of one tokenizer, and a copy of it that reads only marked ones.

    The copy (memory and load time of a second tokenizer) is made when first needed.
    """

    def __init__(self, raw: RawTokenizer) -> None:
        added = raw.get_added_tokens_decoder()
        self._raw = raw
        self._id_by_text = {token.content: token_id for token_id, token in added.items()}
        self._special = {token.content for token in added.values() if token.special}
        self._typed_or_written = _typed_or_written(self._id_by_text)
        self._lock = threading.Lock()
        self._reader: _MarkedReader | None = None

    def guard(self, template_source: str) -> "ChatGuard":
        """The guard for one chat template.

        Some models declare the tokens that their template writes as not special, so those
        are control tokens too.
        """
        written = {text for text in self._id_by_text if text in template_source}
        return ChatGuard(self._special, self._special | written)

    def encode_marked(self, rendered: str) -> list[int]:
        """Ids of a rendered prompt that holds marks; added tokens outside them count.

        Raises:
            InvalidRequest: the tokenizer makes a control token out of typed text.
        """
        text = self._typed_or_written.sub(_written_marked, rendered)
        return self._marked_reader().encode(text, add_special_tokens=False)

    def encode_as_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text in which nothing is a control token."""
        reader = self._marked_reader()
        return reader.encode(_MARKS.sub("", text), add_special_tokens=add_special_tokens)

    def _marked_reader(self) -> "_MarkedReader":
        with self._lock:
            if self._reader is None:
                self._reader = _MarkedReader(self._raw, self._id_by_text)
            return self._reader


class ChatGuard:
    """Marks control tokens in messages.

    In the assistant's own messages only special tokens are marked: a model's earlier answer
    with `<think>` or `<tool_call>` in it must become the same tokens again.
    """

    def __init__(self, special: Iterable[str], control: Iterable[str]) -> None:
        self._special = _any_of(special)
        self._control = _any_of(control)

    def has_typed_control_tokens(self, messages: Sequence[Message], others: Json) -> bool:
        found: list[str] = []

        def look(text: str, pattern: re.Pattern[str]) -> str:
            if not found and pattern.search(text):
                found.append(text)
            return text

        self._map(messages, others, look)
        return bool(found)

    def mark(self, messages: Sequence[Message], others: Json) -> tuple[list[Message], Json]:
        """Copies of the messages, and of other data for the template, with marks."""
        return self._map(messages, others, _typed_marked)

    def _map(
        self,
        messages: Sequence[Message],
        others: Json,
        change: Callable[[str, re.Pattern[str]], str],
    ) -> tuple[list[Message], Json]:
        changed: list[Message] = []
        for message in messages:
            pattern = self._special if message.get("role") == "assistant" else self._control
            changed.append(_map_items(message, pattern, change))
        return changed, _map_texts(others, self._control, change)


def _map_items(
    items: dict[str, Json], pattern: re.Pattern[str], change: Callable[[str, re.Pattern[str]], str]
) -> dict[str, Json]:
    """Keys are texts too: a template may print those of a tool call's arguments."""
    return {
        change(key, pattern): _map_texts(value, pattern, change) for key, value in items.items()
    }


def _map_texts(
    value: Json, pattern: re.Pattern[str], change: Callable[[str, re.Pattern[str]], str]
) -> Json:
    if isinstance(value, str):
        return change(value, pattern)
    if isinstance(value, list):
        return [_map_texts(item, pattern, change) for item in value]
    if isinstance(value, dict):
        return _map_items(value, pattern, change)
    return value


def _typed_marked(text: str, pattern: re.Pattern[str]) -> str:
    return pattern.sub(f"{_OPEN}\\g<0>{_CLOSE}", _MARKS.sub("", text))


def _typed_or_written(texts: Iterable[str]) -> re.Pattern[str]:
    """A typed token with its marks, a lone mark (its token was cut apart), or a token."""
    token = _any_of(texts).pattern
    return re.compile(f"{_OPEN}(?P<typed>{token}){_CLOSE}|[{_OPEN}{_CLOSE}]|(?P<written>{token})")


def _written_marked(found: re.Match[str]) -> str:
    if found["written"] is not None:
        return _WRITTEN + found["written"]
    return found["typed"] or ""


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Longest first, as tokenizers match."""
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


class _MarkedReader:
    """A tokenizer whose added tokens all begin with the mark of written tokens."""

    def __init__(self, raw: RawTokenizer, id_by_text: dict[str, int]) -> None:
        self._raw, unknown_id = _marked_copy(raw, id_by_text)
        # An unknown letter is no control token, whoever writes it.
        self._control_ids = frozenset(id_by_text.values()) - {unknown_id}
        marked = {self._raw.token_to_id(_WRITTEN + text): i for text, i in id_by_text.items()}
        self._id_by_marked_id = {key: i for key, i in marked.items() if key is not None}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        encoding = encoding_of(self._raw, text, add_special_tokens=add_special_tokens)
        ids: list[int] = []
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            original = self._id_by_marked_id.get(token_id, token_id)
            is_typed = start < end and _WRITTEN not in text[start:end]
            if is_typed and original in self._control_ids:
                raise InvalidRequest(
                    f"the text {text[start:end]!r} cannot be encoded as plain text: this model's "
                    f"tokenizer has only the control token {original} for it",
                    param="messages",
                )
            ids.append(original)
        return ids


def _marked_copy(raw: RawTokenizer, id_by_text: dict[str, int]) -> tuple[RawTokenizer, int | None]:
    """The copy, and the id of letters that the vocabulary lacks.

    A vocabulary that is a map gets each marked token under its own id. In one that is a
    list of scored pieces, control tokens get so low a score that plain text avoids them.
    """
    description = json.loads(raw.to_str())
    for token in description["added_tokens"]:
        token["content"] = _WRITTEN + token["content"]
    model = description["model"]
    unknown_id = model.get("unk_id")
    if isinstance(model["vocab"], dict):
        model["vocab"].update({_WRITTEN + text: i for text, i in id_by_text.items()})
        unknown_id = model["vocab"].get(model.get("unk_token"))
    else:
        for piece in model["vocab"]:
            if piece[0] in id_by_text:
                piece[1] = -1e6
    return RawTokenizer.from_str(json.dumps(description, ensure_ascii=False)), unknown_id
