"""Which requests were being computed when a worker group failed, and which one is the cause.

A request that makes a kernel fail does so again wherever it goes, and takes its neighbours along.
Whose slice was in a step that was not answered is a suspect until it has got past that slice.
Suspects of `poison_after` failures are computed one at a time in a group, so that the next failure
names one; and one alone is not computed again. What happens to a group by chance, however often,
is held against nobody who got further in between.
"""

from dataclasses import dataclass, field

from scheduler.group import Group, Issued
from scheduler.sequences import Sequence

_MOST_CHARACTERS = 1000
"""Of what is told of one failure."""


@dataclass(slots=True)
class _Suspect:
    sequence: Sequence
    end: int = 0
    """Position after its slice, which it is past when it has been computed up to there."""
    failures: list[str] = field(default_factory=list)
    """What is known of each."""


class Suspects:
    """Of all groups, by serial; there are none while nothing fails."""

    def __init__(self, poison_after: int, most_unanswered: int) -> None:
        """`poison_after`: failures after which a request is not computed again; 0: never."""
        self._poison_after = poison_after
        self._most_unanswered = most_unanswered
        self._by_serial: dict[int, _Suspect] = {}

    def __len__(self) -> int:
        return len(self._by_serial)

    def failures(self, sequence: Sequence) -> tuple[str, ...]:
        """Those that it was part of, without getting further since the first of them."""
        suspect = self._by_serial.get(sequence.serial)
        return () if suspect is None else tuple(suspect.failures)

    def came(self, sequence: Sequence) -> None:
        """A request that was a suspect elsewhere is one here."""
        if sequence.request.deaths:
            self._by_serial[sequence.serial] = _Suspect(
                sequence,
                end=len(sequence.tokens) + self._most_unanswered,
                failures=list(sequence.request.deaths),
            )

    def left(self, sequence: Sequence) -> None:
        """It has ended."""
        self._by_serial.pop(sequence.serial, None)

    def group_failed(self, group: Group, failure: str) -> list[Sequence]:
        """Note whose slices were not answered, while they are in the group; returns them."""
        if not self._poison_after:
            return []
        ends: dict[int, int] = {}
        for issued in group.unanswered:
            ends |= dict(zip(issued.serial.tolist(), issued.end.tolist(), strict=True))
        struck = [sequence for sequence in group.sequences if sequence.serial in ends]
        for sequence in struck:
            suspect = self._by_serial.setdefault(sequence.serial, _Suspect(sequence))
            suspect.end = max(suspect.end, ends[sequence.serial])
            suspect.failures.append(failure[:_MOST_CHARACTERS])
        return struck

    def culprit(self, struck: list[Sequence]) -> Sequence | None:
        """Of those whose slices were not answered, the one that is the cause, if that is clear."""
        accused = [sequence for sequence in struck if self._is_accused(sequence)]
        return accused[0] if len(accused) == 1 else None

    def why(self, culprit: Sequence) -> str:
        """What its client is told."""
        failures = self.failures(culprit)
        known = "".join(f"\n{at}. {text}" for at, text in enumerate(failures, 1))
        return (
            f"a worker group failed {len(failures)} times while it computed this request, "
            f"which got no further in between, so it is not computed again:{known}"
        )

    def must_wait(self, group: Group, sequence: Sequence) -> bool:
        """Whether it may not start in this group now, since another one must be alone there."""
        if not self._by_serial or not self._is_accused(sequence):
            return False
        return any(
            self._is_accused(suspect.sequence)
            for suspect in self._by_serial.values()
            if suspect.sequence.group_id == group.group_id
        )

    def went_on(self, answered: Issued) -> list[Sequence]:
        """Clear those who are past the slice that they were suspected for; returns them."""
        cleared = []
        for serial, end in zip(answered.serial.tolist(), answered.end.tolist(), strict=True):
            suspect = self._by_serial.get(serial)
            if suspect is not None and end >= suspect.end:
                cleared.append(self._by_serial.pop(serial).sequence)
        return cleared

    def _is_accused(self, sequence: Sequence) -> bool:
        return 0 < self._poison_after <= len(self.failures(sequence))
