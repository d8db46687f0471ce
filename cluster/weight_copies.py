"""Which copies of weights a host keeps, who uses them, and who waits for one: no I/O.

A copy is known by its part (which layers and slices) and its version (which model, how laid
out). A rank that asks first fills it; others that ask meanwhile wait for it, and one of them
fills it if the first is gone before it has. A copy outlives the ranks that use it, so that their
successors find it, until nobody uses it and another version of its part is there.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias


class CopyName(NamedTuple):
    """What a rank asks for."""

    part: str
    version: str


@dataclass(frozen=True, slots=True)
class Give:
    """Hand this copy to a rank."""

    peer: int
    name: CopyName


@dataclass(frozen=True, slots=True)
class LetFill:
    """Tell a rank that it is to fill the copy that it asked for."""

    peer: int


@dataclass(frozen=True, slots=True)
class Drop:
    """A copy is of no use any more."""

    name: CopyName


Instruction: TypeAlias = Give | LetFill | Drop


@dataclass(slots=True)
class _Copy:
    is_whole: bool = False
    filler: int | None = None
    users: set[int] = field(default_factory=set)
    waiting: deque[int] = field(default_factory=deque)


class WeightCopies:
    """Of one host. Peers are the ranks' connections, by number."""

    def __init__(self) -> None:
        self._copies: dict[CopyName, _Copy] = {}
        self._newest: dict[str, CopyName] = {}
        """By part, the copy that was whole last."""
        self._asked: dict[int, CopyName] = {}
        """By peer; each asks once."""

    @property
    def whole(self) -> frozenset[CopyName]:
        return frozenset(name for name, copy in self._copies.items() if copy.is_whole)

    def has_asked(self, peer: int) -> bool:
        return peer in self._asked

    def is_filling(self, peer: int) -> bool:
        name = self._asked.get(peer)
        return name is not None and self._copies[name].filler == peer

    def ask(self, peer: int, name: CopyName) -> list[Instruction]:
        """A rank wants a copy: it gets it, fills it, or waits."""
        assert peer not in self._asked, "a peer asks once"
        self._asked[peer] = name
        copy = self._copies.setdefault(name, _Copy())
        if copy.is_whole:
            copy.users.add(peer)
            return [Give(peer, name)]
        copy.waiting.append(peer)
        return self._let_next_fill(copy)

    def filled(self, peer: int) -> tuple[CopyName, list[Instruction]]:
        """The filler has filled its copy, and uses it: whoever waits gets it."""
        assert self.is_filling(peer), "only who was told to fills a copy"
        name = self._asked[peer]
        copy = self._copies[name]
        copy.is_whole, copy.filler = True, None
        copy.users = {peer, *copy.waiting}
        done: list[Instruction] = [Give(other, name) for other in copy.waiting]
        copy.waiting.clear()
        self._newest[name.part] = name
        return name, [*done, *self._drop_idle(name.part)]

    def gone(self, peer: int) -> list[Instruction]:
        """A rank has ended, or has no use for a copy any more. One that never asked is no error."""
        name = self._asked.pop(peer, None)
        if name is None:
            return []
        copy = self._copies[name]
        copy.users.discard(peer)
        if peer in copy.waiting:
            copy.waiting.remove(peer)
        if copy.filler == peer:
            copy.filler = None
        if not copy.is_whole:
            if not copy.waiting and copy.filler is None:
                del self._copies[name]
                return []
            return self._let_next_fill(copy)
        return self._drop_idle(name.part)

    def _let_next_fill(self, copy: _Copy) -> list[Instruction]:
        if copy.filler is not None or not copy.waiting:
            return []
        copy.filler = copy.waiting.popleft()
        return [LetFill(copy.filler)]

    def _drop_idle(self, part: str) -> list[Instruction]:
        """Copies of a part that nobody uses, but for the newest."""
        idle = [
            name
            for name, copy in self._copies.items()
            if name.part == part and copy.is_whole and not copy.users and name != self._newest[part]
        ]
        for name in idle:
            del self._copies[name]
        return [Drop(name) for name in idle]
