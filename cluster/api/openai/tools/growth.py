"""What some news of an answer add to its content and to its calls."""

from collections.abc import Iterable
from dataclasses import dataclass

from cluster.api.openai.tools.parser import ArgumentsText, CallBegins, ContentText, ToolEvent


@dataclass(slots=True)
class CallGrowth:
    """A call, or what it gained: id and name come with its first growth alone."""

    index: int
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class AnswerGrowth:
    """Content and calls, each in order."""

    content: str
    calls: list[CallGrowth]


def growth_of(events: Iterable[ToolEvent]) -> AnswerGrowth:
    """All events as one growth."""
    texts: list[str] = []
    calls: dict[int, CallGrowth] = {}
    for event in events:
        match event:
            case ContentText(text):
                texts.append(text)
            case CallBegins(index, call_id, name):
                calls[index] = CallGrowth(index, call_id, name)
            case ArgumentsText(index, text):
                calls.setdefault(index, CallGrowth(index)).arguments += text
    return AnswerGrowth("".join(texts), list(calls.values()))
