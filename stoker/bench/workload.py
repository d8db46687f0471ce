"""What a load asks: synthetic prompts, or those of a file."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import TypeAlias

from stoker.bench.lengths import LengthMix

Messages: TypeAlias = list[dict[str, object]]
Prompt: TypeAlias = str | list[int] | Messages

TOKEN_IDS = (1000, 30000)
"""Of synthetic prompts: plain tokens in any vocabulary of 32,000 or more."""

_WORD_TEXT = """
about after again air all also always an and another any are around as ask at away back be because
been before below best between big book both but by call came can city close come could country day
did different do does done door down each early earth end even every eye face far father few find
first follow food for form found four from gave get give go good great group had half hand hard has
have he head hear help her here high him his home house how if in into is it its just keep kind know
land large last late learn left let life light like line list little live long look made make man
many may me men might mile more most mother move much must my name near need never new next night no
not now number of off often old on once one only open or other our out over own page paper part
people place plant play point put read real right river run said same saw say school sea second see
set she should show side small so some soon sound start state still stop story study such sun take
talk tell than that the their them then there these they thing think this those thought three
through time to together too took tree try turn two under until up us use very walk want was watch
water way we well went were what when where which while white who why will with word work world
would write year you young your
"""
WORDS = tuple(_WORD_TEXT.split())
"""For synthetic text: words that are one token, with the space before them, to most models."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a workload."""

    prompt: Prompt
    max_tokens: int | None
    """None: the server decides."""
    arrival_s: float | None = None
    """Seconds after the start, in a workload that says so."""
    made_up_len: int = 0
    """Tokens of a prompt that is still to be made up, in place of an empty one."""


@dataclass(frozen=True, slots=True)
class MadeUp:
    """What prompts without sense are made of."""

    is_text: bool = False
    """Words instead of token ids, about one token each."""
    token_ids: tuple[int, int] = TOKEN_IDS
    """Ids are drawn from the first to the last of these."""

    def draw(self, count: int, contents: random.Random) -> list[int]:
        low, high = (0, len(WORDS) - 1) if self.is_text else self.token_ids
        return contents.choices(range(low, high + 1), k=count)

    def prompt(self, drawn: list[int]) -> str | list[int]:
        return " ".join(WORDS[index] for index in drawn) if self.is_text else drawn

    def __str__(self) -> str:
        return "words" if self.is_text else "tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """Prompts of drawn lengths, behind shared prefixes if wanted.

    Lengths follow the seed alone, so that two runs ask for the same work. Contents also follow
    the run, so that a server's prefix cache knows none of them; see `repeats`.
    """

    input_len: LengthMix
    """After the prefix."""
    output_len: LengthMix
    prefix_len: int = 0
    """Tokens at the front that requests share."""
    num_prefixes: int = 1
    """How many such fronts there are; each request takes one of them."""
    made_of: MadeUp = field(default_factory=MadeUp)
    repeats: bool = False
    """The same contents in each run of one seed, as a study of caches may want."""

    def calls(self, seed: int, run: str) -> Iterator[Call]:
        """Requests without end.

        Args:
            run: whatever tells this run from any other.
        """
        lengths = random.Random(f"{seed} lengths")
        contents = random.Random(f"{seed} contents" if self.repeats else f"{seed} {run}")
        made = self.made_of
        fronts = [made.draw(self.prefix_len, contents) for _ in range(self.num_prefixes)]
        while True:
            num_input = self.input_len.draw(lengths)
            num_output = self.output_len.draw(lengths)
            front = lengths.choice(fronts)
            yield Call(made.prompt(front + made.draw(num_input, contents)), num_output)

    def __str__(self) -> str:
        front = ""
        if self.prefix_len:
            front = f"{self.prefix_len} shared {self.made_of} ({self.num_prefixes} such fronts), "
        return f"synthetic: {front}{self.input_len} {self.made_of} in, {self.output_len} tokens out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Requests that were read from a file; asked for more than there are, it begins again."""

    entries: Sequence[Call]
    name: str
    made_of: MadeUp = field(default_factory=MadeUp)
    """For entries of which only the length is known."""

    def calls(self, seed: int, run: str) -> Iterator[Call]:
        """Requests without end, in the order of the file whatever the seed."""
        contents = random.Random(f"{seed} {run}")
        for call in cycle(self.entries):
            if call.made_up_len:
                drawn = self.made_of.draw(call.made_up_len, contents)
                yield replace(call, prompt=self.made_of.prompt(drawn))
            else:
                yield call

    def __str__(self) -> str:
        return f"{self.name}: {len(self.entries)} requests"


Workload: TypeAlias = Synthetic | Recorded


def short_calls(made_of: MadeUp, seed: int, run: str, count: int) -> list[Call]:
    """Requests to warm a server up with, whose prompts warm no cache for the run's own."""
    short = Synthetic(
        input_len=LengthMix(((16, 16),)), output_len=LengthMix(((8, 8),)), made_of=made_of
    )
    return list(islice(short.calls(seed, f"{run} warm-up"), count))
