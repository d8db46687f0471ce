"""What a reader puts together from the events of a stream, in each route's shape."""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

Event = dict[str, object]


@dataclass(frozen=True)
class Received:
    """One event with its id."""

    event_id: str
    data: Event | None
    """None: the mark of the end."""


def received(body: bytes) -> list[Received]:
    """Events as they came; each has an id but the mark of the end."""
    found: list[Received] = []
    frames = body.decode().split("\n\n")
    assert frames.pop() == "", "an event is cut off"
    for frame in frames:
        fields = dict(line.split(": ", 1) for line in frame.split("\n"))
        if fields["data"] == "[DONE]":
            found.append(Received("", None))
        else:
            found.append(Received(fields["id"], json.loads(fields["data"])))
    return found


@dataclass
class Joined:
    """All of a stream, however it was cut. Two that tell a reader the same are equal."""

    parts: dict[str, object] = field(default_factory=dict)

    def add(self, name: str, more: object) -> None:
        """Text and lists grow; anything else comes once."""
        before = self.parts.get(name)
        if before is None:
            self.parts[name] = more
        else:
            assert isinstance(before, str | list), f"{name} came twice: {before!r}, {more!r}"
            self.parts[name] = before + more  # type: ignore[operator]


def joined(events: Sequence[Received]) -> Joined:
    """
    Raises:
        AssertionError: something came twice that comes once.
    """
    whole = Joined()
    for event in copy.deepcopy(events):
        if event.data is None:
            whole.add("done", True)
        elif "type" in event.data:
            _add_typed(whole, event.data)
        else:
            _add_chunk(whole, event.data)
    return whole


def _add_chunk(whole: Joined, data: Event) -> None:
    envelope = {key: data[key] for key in ("id", "object", "created", "model")}
    assert whole.parts.setdefault("envelope", envelope) == envelope
    if data.get("usage"):
        whole.add("usage", data["usage"])
    choices = data["choices"]
    assert isinstance(choices, list)
    for choice in choices:
        _add_choice(whole, choice)


def _add_choice(whole: Joined, choice: Event) -> None:
    index = choice.pop("index")
    delta = choice.pop("delta", {})
    assert isinstance(delta, dict)
    for call in delta.pop("tool_calls", ()):
        for key, value in {**call, **call["function"]}.items():
            if key not in ("index", "function") and value is not None:
                name = f"{index} call {call['index']} {key}"
                whole.add(name, value if key == "arguments" else [value])
    logprobs = choice.pop("logprobs", None)
    for key, values in (logprobs or {}).items():
        whole.add(f"{index} logprobs {key}", values or [])
    for key, value in {**choice, **delta}.items():
        if value is None or value == "":
            continue
        whole.add(f"{index} {key}", [value] if key in ("role", "finish_reason") else value)


def _add_typed(whole: Joined, data: Event) -> None:
    """An event of `/v1/responses`."""
    kind = data["type"]
    whole.parts["events"] = number = int(str(whole.parts.get("events", 0)))
    assert data["sequence_number"] == number
    whole.parts["events"] = number + 1
    place = f"{data.get('output_index')} {data.get('item_id')} {kind}"
    if str(kind).endswith(".delta"):
        whole.add(place, data["delta"])
        whole.add(f"{place} logprobs", data.get("logprobs") or [])
    else:
        whole.add(place, [{key: v for key, v in data.items() if key != "sequence_number"}])
