"""The items of a response as its text grows. Every change of them is an event of the stream.

A whole response is made from the same changes, so both agree by construction.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from cluster.api.token_logprobs import ShownToken, TokenEntry
from cluster.api.tools.parser import ArgumentsText, CallBegins, ContentText, ToolParser

Fields: TypeAlias = dict[str, object]
"""A JSON object: an item, a part of one, or an event without its sequence number."""


class OutputItems:
    """One output in, message and function_call items out, in the order of the text."""

    def __init__(self, parser: ToolParser | None, new_id: Callable[[str], str]) -> None:
        """
        Args:
            parser: None where no tools are offered: all is text.
            new_id: makes an id that begins with the text given.
        """
        self._parser = parser
        self._new_id = new_id
        self.closed: list[Fields] = []
        self._open: _OpenMessage | _OpenCall | None = None

    def grow(self, text: str, entries: Sequence[TokenEntry] | None = None) -> list[Fields]:
        """Events of more text; `entries` only without a parser."""
        if self._parser is None:
            return list(self._put_text(text, entries or ())) if text or entries else []
        return [event for news in self._parser.feed(text) for event in self._put(news)]

    def end(self, *, is_cut: bool) -> list[Fields]:
        """Events of the end. An answer without any text is an empty message.

        Args:
            is_cut: whether a limit ended it, which leaves its last item incomplete.
        """
        events: list[Fields] = []
        if self._parser is not None:
            events += [event for news in self._parser.flush() for event in self._put(news)]
        if self._open is None and not self.closed:
            events += self._put_text("", ())
        return [*events, *self._close("incomplete" if is_cut else "completed")]

    def _put(self, news: ContentText | CallBegins | ArgumentsText) -> Iterator[Fields]:
        match news:
            case ContentText(text):
                yield from self._put_text(text, ())
            case CallBegins(_, call_id, name):
                yield from self._close("completed")
                item = _OpenCall(self._new_id("fc_"), len(self.closed), call_id, name)
                self._open = item
                yield from item.opening()
            case ArgumentsText(_, text):
                assert isinstance(self._open, _OpenCall), "arguments follow their call"
                yield self._open.grow(text)

    def _put_text(self, text: str, entries: Sequence[TokenEntry]) -> Iterator[Fields]:
        if not isinstance(self._open, _OpenMessage):
            yield from self._close("completed")
            self._open = _OpenMessage(self._new_id("msg_"), len(self.closed))
            yield from self._open.opening()
        if text or entries:
            yield self._open.grow(text, entries)

    def _close(self, status: str) -> Iterator[Fields]:
        item, self._open = self._open, None
        if item is not None:
            self.closed.append(item.item(status))
            yield from item.closing(status)


class _OpenMessage:
    """A message that grows; its content is one part of text."""

    def __init__(self, item_id: str, index: int) -> None:
        self._id = item_id
        self._index = index
        self._texts: list[str] = []
        self._logprobs: list[Fields] = []

    def item(self, status: str) -> Fields:
        content = [self._part()] if status != "in_progress" else []
        return {
            "id": self._id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def opening(self) -> Iterator[Fields]:
        yield _item_event("added", self._index, self.item("in_progress"))
        yield {"type": "response.content_part.added", **self._place(), "part": self._part()}

    def grow(self, text: str, entries: Iterable[TokenEntry]) -> Fields:
        logprobs = [_logprob_of(entry) for entry in entries]
        self._texts.append(text)
        self._logprobs += logprobs
        return {
            "type": "response.output_text.delta",
            **self._place(),
            "delta": text,
            "logprobs": logprobs,
        }

    def closing(self, status: str) -> Iterator[Fields]:
        part = self._part()
        yield {
            "type": "response.output_text.done",
            **self._place(),
            "text": part["text"],
            "logprobs": self._logprobs,
        }
        yield {"type": "response.content_part.done", **self._place(), "part": part}
        yield _item_event("done", self._index, self.item(status))

    def _place(self) -> Fields:
        return {"item_id": self._id, "output_index": self._index, "content_index": 0}

    def _part(self) -> Fields:
        return {
            "type": "output_text",
            "text": "".join(self._texts),
            "annotations": [],
            "logprobs": list(self._logprobs),
        }


class _OpenCall:
    """A call whose arguments grow."""

    def __init__(self, item_id: str, index: int, call_id: str, name: str) -> None:
        self._id, self._index = item_id, index
        self._call_id, self._name = call_id, name
        self._arguments: list[str] = []

    def item(self, status: str) -> Fields:
        return {
            "id": self._id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self._arguments),
        }

    def opening(self) -> Iterator[Fields]:
        yield _item_event("added", self._index, self.item("in_progress"))

    def grow(self, text: str) -> Fields:
        self._arguments.append(text)
        return {
            "type": "response.function_call_arguments.delta",
            "item_id": self._id,
            "output_index": self._index,
            "delta": text,
        }

    def closing(self, status: str) -> Iterator[Fields]:
        yield {
            "type": "response.function_call_arguments.done",
            "item_id": self._id,
            "output_index": self._index,
            "name": self._name,
            "arguments": "".join(self._arguments),
        }
        yield _item_event("done", self._index, self.item(status))


def _item_event(what: str, index: int, item: Fields) -> Fields:
    return {"type": f"response.output_item.{what}", "output_index": index, "item": item}


def _logprob_of(entry: TokenEntry) -> Fields:
    return {**_shown(entry.token), "top_logprobs": [_shown(token) for token in entry.likeliest]}


def _shown(token: ShownToken) -> Fields:
    return {"token": token.text, "bytes": list(token.piece), "logprob": token.logprob}
