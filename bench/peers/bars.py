"""What is compared with what, and how far ahead Stoker should be: data, and nothing else."""

from dataclasses import dataclass

from bench.peers.record import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One line of the table: the best of some sides of ours against the best of some others."""

    row: str
    """What `--only` calls it; several bars may share a row."""
    what: str
    ours: tuple[str, ...]
    theirs: tuple[str, ...] = ()
    """Empty: the figure stands alone."""
    trace: str = "c"
    figure: Figure
    least: float | None = None
    """Of the ratio ours / theirs, or of our figure where it stands alone."""
    most: float | None = None

    @property
    def sides(self) -> tuple[str, ...]:
        return self.ours + self.theirs


@dataclass(frozen=True, slots=True)
class Stage:
    """Sides that live at the same time and take turns; what they hold must fit into memory."""

    name: str
    sides: tuple[str, ...]


STAGES = (
    Stage("32 bit", ("stoker.fp32", "vllm.fp32", "llama.f32", "transformers.fp32")),
    Stage("16 bit", ("stoker.bf16", "vllm.fp32", "vllm.bf16", "llama.bf16")),
    Stage("8 bit", ("stoker.int8", "vllm.fp32", "llama.q8_0")),
    Stage("large, 16 bit", ("stoker.bf16.large", "vllm.fp32.large", "llama.bf16.large")),
    Stage("large, 8 bit", ("stoker.int8.large", "vllm.bf16.large", "llama.q8_0.large")),
    Stage("two ranks", ("stoker.fp32", "stoker.tp2")),
    Stage("HTTP", ("stoker.fp32", "stoker.http")),
    Stage("prefix cache", ("stoker.fp32", "stoker.cached")),
    Stage("Ray", ("stoker.ray",)),
)

VLLM = ("vllm.fp32", "vllm.bf16")
LLAMA = ("llama.f32", "llama.bf16", "llama.q8_0")
VLLM_LARGE = ("vllm.fp32.large", "vllm.bf16.large")


def c_decode(row: str, what: str, ours: str, theirs: tuple[str, ...], least: float) -> Bar:
    return Bar(
        row=row,
        what=f"one stream, {what}",
        ours=(ours,),
        theirs=theirs,
        figure=Figure.DECODE_RATE,
        least=least,
    )


def rate(
    row: str,
    what: str,
    trace: str,
    ours: tuple[str, ...],
    theirs: tuple[str, ...],
    least: float | None,
) -> Bar:
    return Bar(
        row=row,
        what=what,
        trace=trace,
        ours=ours,
        theirs=theirs,
        figure=Figure.OUTPUT_RATE,
        least=least,
    )


def large(width: str, peer: str) -> tuple[Bar, ...]:
    """TinyLlama-1.1B's shape at one width of weights: single stream and eight."""
    ours, same = f"stoker.{width}.large", (f"llama.{peer}.large",)
    what = f"1.1B, {width}"
    return (
        c_decode("large", what, ours, VLLM_LARGE, 2.0),
        c_decode("large", what, ours, same, 1.1),
        rate("large", f"trace d, {what}", "d", (ours,), VLLM_LARGE, 2.0),
        rate("large", f"trace d, {what}", "d", (ours,), same, 1.1),
    )


BARS = (
    c_decode("c-fp32", "fp32", "stoker.fp32", ("vllm.fp32",), 2.0),
    c_decode("c-fp32", "fp32", "stoker.fp32", ("llama.f32",), 1.1),
    c_decode("c-bf16", "bf16", "stoker.bf16", VLLM, 3.5),
    c_decode("c-bf16", "bf16", "stoker.bf16", ("llama.bf16",), 1.25),
    c_decode("c-int8", "int8", "stoker.int8", ("llama.q8_0",), 1.4),
    Bar(
        row="ttft",
        what="one stream, fp32",
        ours=("stoker.fp32",),
        theirs=("vllm.fp32", "llama.f32", "transformers.fp32"),
        figure=Figure.TTFT,
        most=0.6,
    ),
    rate("a", "trace a, fp32 or bf16", "a", ("stoker.fp32", "stoker.bf16"), VLLM, 1.6),
    rate("a", "trace a, fp32 or bf16", "a", ("stoker.fp32", "stoker.bf16"), LLAMA, 2.0),
    rate("a", "trace a, fp32", "a", ("stoker.fp32",), ("transformers.fp32",), None),
    rate("b", "trace b, fp32 or bf16", "b", ("stoker.fp32", "stoker.bf16"), VLLM, 2.2),
    rate("b", "trace b, fp32 or bf16", "b", ("stoker.fp32", "stoker.bf16"), LLAMA, 2.4),
    rate("a-int8", "trace a, int8", "a", ("stoker.int8",), VLLM, 2.2),
    rate("a-int8", "trace a, int8", "a", ("stoker.int8",), ("llama.q8_0",), None),
    rate("b-int8", "trace b, int8", "b", ("stoker.int8",), ("llama.q8_0",), None),
    *large("bf16", "bf16"),
    *large("int8", "q8_0"),
    rate("tp", "trace a, TP 2 against TP 1", "a", ("stoker.tp2",), ("stoker.fp32",), 0.9),
    c_decode("tp", "TP 2 against TP 1", "stoker.tp2", ("stoker.fp32",), 0.9),
    rate("http", "trace a, HTTP against offline", "a", ("stoker.http",), ("stoker.fp32",), 0.95),
    rate(
        *("prefix", "trace a, prefix cache on, no hits, against off", "a"),
        *(("stoker.cached",), ("stoker.fp32",), 0.99),
    ),
    Bar(
        row="prefix",
        what="32 prompts with one prefix of 1,000 tokens, cache on against off",
        trace="p",
        ours=("stoker.cached",),
        theirs=("stoker.fp32",),
        figure=Figure.TTFT,
        most=0.15,
    ),
    *(
        Bar(row="start", what="fp32, local", ours=("stoker.fp32",), theirs=(peer,), figure=figure)
        for figure in (Figure.START, Figure.PEAK)
        for peer in ("vllm.fp32", "llama.f32", "transformers.fp32")
    ),
    Bar(row="start", what="fp32, local", ours=("stoker.fp32",), figure=Figure.START, most=4.0),
    Bar(row="start", what="fp32, Ray", ours=("stoker.ray",), figure=Figure.START, most=8.0),
)
OTHER_ROWS = ("quality", "scheduler")
"""Measured by commands of their own."""
ROWS = tuple(dict.fromkeys(bar.row for bar in BARS)) + OTHER_ROWS


def turns_of(stage: Stage, bars: tuple[Bar, ...]) -> dict[str, list[str]]:
    """Which sides of a stage play which traces, by trace, for the bars that have a part in it.

    A side from elsewhere (vLLM's best, say) is played again beside ours, to be met in turn.
    """
    sides: dict[str, list[str]] = {}
    for bar in bars:
        has_others = not bar.theirs or set(bar.theirs) & set(stage.sides)
        if not has_others or not set(bar.ours) & set(stage.sides):
            continue
        for side in stage.sides:
            if side in bar.sides and side not in sides.setdefault(bar.trace, []):
                sides[bar.trace].append(side)
    return {
        trace: [side for side in stage.sides if side in playing] for trace, playing in sides.items()
    }
