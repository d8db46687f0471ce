"""What was measured, as it is kept in a JSON file from one run of the comparison to the next."""

import statistics
from enum import Enum
from pathlib import Path

import msgspec
from msgspec import Struct

from bench.peers.driver import Ran


class Figure(Enum):
    """What can be compared: its unit, and whether more of it is better."""

    OUTPUT_RATE = ("output tokens/s", True)
    DECODE_RATE = ("decode tokens/s", True)
    TTFT = ("TTFT, ms", False)
    START = ("launch to first token, s", False)
    PEAK = ("peak memory, MiB (PSS)", False)

    @property
    def unit(self) -> str:
        return self.value[0]

    @property
    def is_more_better(self) -> bool:
        return self.value[1]


class Replays(Struct, kw_only=True):
    """The runs of one side on one trace."""

    run_id: str
    """Of the comparison that they were part of: two sides with one id took turns."""
    commit: str
    seconds: list[float] = []
    ttft_s: list[float] = []
    decode_rate: list[float] = []
    output_tokens: int = 0
    heads: list[list[int]] = []
    """The first tokens of each answer in the first turn."""
    failure: str = ""
    """Why there are no more runs than there are."""

    def add(self, ran: Ran) -> None:
        self.seconds.append(ran.seconds)
        self.output_tokens = ran.output_tokens
        if ran.ttft_s is not None:
            self.ttft_s.append(ran.ttft_s)
        if ran.decode_rate is not None:
            self.decode_rate.append(ran.decode_rate)
        self.heads = self.heads or ran.heads


class Launch(Struct, kw_only=True):
    """One start of a side."""

    run_id: str
    commit: str
    about: str = ""
    start_s: float = 0.0
    peak_bytes: int = 0
    failure: str = ""


class Part(Struct, kw_only=True):
    """Something beside traces that a command measured: named figures, or a text of its own."""

    run_id: str
    commit: str
    figures: dict[str, float] = {}
    text: str = ""
    failure: str = ""


class Results(Struct, kw_only=True):
    """All that is known, the newest of each."""

    machine: str = ""
    replays: dict[str, Replays] = {}
    """By side and trace: `vllm.fp32 a`."""
    launches: dict[str, Launch] = {}
    """By side."""
    parts: dict[str, Part] = {}

    def value(self, side: str, trace: str, figure: Figure) -> float | None:
        """The median of a figure, in its unit; None: it was not measured."""
        if figure in (Figure.START, Figure.PEAK):
            launch = self.launches.get(side)
            if launch is None or launch.failure:
                return None
            return launch.start_s if figure is Figure.START else launch.peak_bytes / 2**20
        replays = self.replays.get(f"{side} {trace}")
        if replays is None or not replays.seconds:
            return None
        if figure is Figure.OUTPUT_RATE:
            return replays.output_tokens / statistics.median(replays.seconds)
        if figure is Figure.DECODE_RATE:
            return statistics.median(replays.decode_rate) if replays.decode_rate else None
        return 1e3 * statistics.median(replays.ttft_s) if replays.ttft_s else None

    def run_id(self, side: str, trace: str, figure: Figure) -> str:
        """Of the comparison that a figure is from; empty: it was not measured."""
        if figure in (Figure.START, Figure.PEAK):
            return self.launches[side].run_id if side in self.launches else ""
        found = self.replays.get(f"{side} {trace}")
        return found.run_id if found else ""

    def failure(self, side: str, trace: str) -> str:
        """Why a side has no figure, in words; empty: nobody tried, or it has."""
        replays, launch = self.replays.get(f"{side} {trace}"), self.launches.get(side)
        if replays is not None and (replays.failure or replays.seconds):
            return replays.failure
        return launch.failure if launch is not None else ""


def read_results(path: Path) -> Results:
    """What an earlier run left; nothing, if there was none."""
    return msgspec.json.decode(path.read_bytes(), type=Results) if path.exists() else Results()


def write_results(results: Results, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
