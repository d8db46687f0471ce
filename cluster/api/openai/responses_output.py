"""The items of a response as its text grows. Every change of them is an event of the stream.

A whole response is made from the same changes, so both agree by construction.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from cluster.api.openai.responses_shapes import (
    CallItem,
    Item,
    ItemStatus,
    MessageItem,
    OutputText,
    ResponseLogprob,
    ResponseTopLogprob,
)
from cluster.api.openai.token_logprobs import TokenEntry
from cluster.api.openai.tools.parser import (
    ArgumentsText,
    CallBegins,
    ContentText,
    ToolEvent,
    ToolParser,
)

Event: TypeAlias = dict[str, object]
"""The fields of an event, without its sequence number."""


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
        self.closed: list[Item] = []
        self._open: _OpenMessage | _OpenCall | None = None

    def grow(self, text: str, entries: Sequence[TokenEntry] | None = None) -> list[Event]:
        """Events of more text; `entries` only without a parser."""
        if self._parser is None:
            return list(self._put_text(text, entries or ())) if text or entries else []
        return self._put_all(self._parser.feed(text))

    def end(self, *, is_cut: bool) -> list[Event]:
        """Events of the end. An answer without any text is an empty message.

        Args:
            is_cut: whether a limit ended it, which leaves its last item incomplete.
        """
        events = [] if self._parser is None else self._put_all(self._parser.flush())
        if self._open is None and not self.closed:
            events += self._put_text("", ())
        return [*events, *self._close("incomplete" if is_cut else "completed")]

    def _put_all(self, news: Sequence[ToolEvent]) -> list[Event]:
        return [event for each in news for event in self._put(each)]

    def _put(self, news: ToolEvent) -> Iterator[Event]:
        match news:
            case ContentText(text):
                yield from self._put_text(text, ())
            case CallBegins(_, call_id, name):
                yield from self._close("completed")
                self._open = _OpenCall(self._new_id("fc_"), len(self.closed), call_id, name)
                yield self._open.opening()
            case ArgumentsText(_, text):
                assert isinstance(self._open, _OpenCall), "arguments follow their call"
                yield self._open.grow(text)

    def _put_text(self, text: str, entries: Sequence[TokenEntry]) -> Iterator[Event]:
        if not isinstance(self._open, _OpenMessage):
            yield from self._close("completed")
            self._open = _OpenMessage(self._new_id("msg_"), len(self.closed))
            yield from self._open.opening()
        if text or entries:
            yield self._open.grow(text, entries)

    def _close(self, status: ItemStatus) -> Iterator[Event]:
        item, self._open = self._open, None
        if item is not None:
            self.closed.append(item.item(status))
            yield from item.closing(status)


class _OpenMessage:
    """A message that grows; its content is one part of text."""

    def __init__(self, item_id: str, index: int) -> None:
        self._id, self._index = item_id, index
        self._texts: list[str] = []
        self._logprobs: list[ResponseLogprob] = []

    def item(self, status: ItemStatus) -> MessageItem:
        content = [] if status == "in_progress" else [self._part()]
        return MessageItem(id=self._id, status=status, content=content)

    def opening(self) -> Iterator[Event]:
        yield _item_event("added", self._index, self.item("in_progress"))
        yield self._event("content_part.added", part=self._part())

    def grow(self, text: str, entries: Sequence[TokenEntry]) -> Event:
        logprobs = [_logprob_of(entry) for entry in entries]
        self._texts.append(text)
        self._logprobs += logprobs
        return self._event("output_text.delta", delta=text, logprobs=logprobs)

    def closing(self, status: ItemStatus) -> Iterator[Event]:
        part = self._part()
        yield self._event("output_text.done", text=part.text, logprobs=part.logprobs)
        yield self._event("content_part.done", part=part)
        yield _item_event("done", self._index, self.item(status))

    def _event(self, kind: str, **fields: object) -> Event:
        place = {"item_id": self._id, "output_index": self._index, "content_index": 0}
        return {"type": f"response.{kind}", **place, **fields}

    def _part(self) -> OutputText:
        return OutputText(text="".join(self._texts), logprobs=list(self._logprobs))


class _OpenCall:
    """A call whose arguments grow."""

    def __init__(self, item_id: str, index: int, call_id: str, name: str) -> None:
        self._id, self._index = item_id, index
        self._call_id, self._name = call_id, name
        self._texts: list[str] = []

    def item(self, status: ItemStatus) -> CallItem:
        return CallItem(
            id=self._id,
            status=status,
            call_id=self._call_id,
            name=self._name,
            arguments="".join(self._texts),
        )

    def opening(self) -> Event:
        return _item_event("added", self._index, self.item("in_progress"))

    def grow(self, text: str) -> Event:
        self._texts.append(text)
        return self._event("delta", delta=text)

    def closing(self, status: ItemStatus) -> Iterator[Event]:
        yield self._event("done", name=self._name, arguments="".join(self._texts))
        yield _item_event("done", self._index, self.item(status))

    def _event(self, kind: str, **fields: object) -> Event:
        place = {"item_id": self._id, "output_index": self._index}
        return {"type": f"response.function_call_arguments.{kind}", **place, **fields}


def _item_event(kind: str, index: int, item: Item) -> Event:
    return {"type": f"response.output_item.{kind}", "output_index": index, "item": item}


def _logprob_of(entry: TokenEntry) -> ResponseLogprob:
    token = entry.token
    return ResponseLogprob(
        token=token.text,
        bytes=list(token.piece),
        logprob=token.logprob,
        top_logprobs=[
            ResponseTopLogprob(token=one.text, bytes=list(one.piece), logprob=one.logprob)
            for one in entry.likeliest
        ],
    )
