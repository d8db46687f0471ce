"""Lengths of synthetic prompts and answers, in tokens: one number, ranges, or a mix of both."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LengthMix:
    """Ranges of which each request draws one, each as likely, and then a length in it."""

    ranges: tuple[tuple[int, int], ...]
    """First and last length of each."""

    @classmethod
    def parse(cls, text: str) -> "LengthMix":
        """From `128`, `64-256`, or several of these with commas; repeat one to weigh it more.

        Raises:
            ValueError: the text is of no such form.
        """
        ranges = []
        for part in text.split(","):
            first, _, last = part.strip().partition("-")
            try:
                low = int(first)
                high = int(last) if last else low
            except ValueError:
                raise ValueError(
                    f"{part.strip()!r} is no length; write one as 128, a range as 64-256, "
                    "and several with commas"
                ) from None
            if not 1 <= low <= high:
                raise ValueError(f"{part.strip()!r}: lengths are at least 1, the smaller one first")
            ranges.append((low, high))
        return cls(tuple(ranges))

    def draw(self, chance: random.Random) -> int:
        low, high = chance.choice(self.ranges)
        return chance.randint(low, high)

    def __str__(self) -> str:
        return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in self.ranges)
