"""How fast the native linear layers are, by shape, format of weights and number of rows.

The weights of a row of the table are many copies that are multiplied in turn, more than caches
hold, as the layers of a model are; `--hot` takes one copy, over and over. Of few rows memory is
the limit (GB/s), of many the arithmetic (GFLOP/s). Beside them torch's `F.linear` with the same
weights; for int8, which it has not, with float32.
"""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from bench.report import header, table
from worker.ops.native.structs import Batch, Code, LinearArgs, Rows, operation, pointer
from worker.ops.native.team import FORMATS, Team, as_array, levels

SHAPES = "960x576,576x576,3072x576,576x1536,49152x576,2048x2048"
"""Of SmolLM2-135M: qkv, o, gate_up, down and the output head; and a larger model's o."""
FORMAT_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in FORMATS}
COLD_BYTES = 96 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """One layer, as many times as it takes to be cold."""

    out_features: int
    in_features: int
    dtype: torch.dtype
    copies: int

    @property
    def flops_per_row(self) -> int:
        return 2 * self.out_features * self.in_features * self.copies

    def weights(self) -> list[Tensor]:
        dtype = torch.float32 if self.dtype is torch.int8 else self.dtype
        shape = self.out_features, self.in_features
        return [torch.randn(shape).to(dtype) for _ in range(self.copies)]


def fastest_s(run: Callable[[], object], seconds: float) -> float:
    """The least that a run took: others on the machine only ever make it longer."""
    run()
    took: list[float] = []
    while len(took) < 2 or sum(took) < seconds:
        started = time.perf_counter()
        run()
        took.append(time.perf_counter() - started)
    return min(took)


def ours(team: Team, case: Case, packed: list[Tensor], rows: int) -> Callable[[], object]:
    x, out = torch.randn(rows, case.in_features), torch.empty(rows, case.out_features)
    num_bytes = team.linear_scratch_bytes(rows, case.in_features, case.dtype)
    scratch = torch.empty(num_bytes, dtype=torch.uint8)
    operations = as_array(
        [
            operation(
                Code.LINEAR,
                LinearArgs(
                    pointer(x),
                    pointer(weight),
                    None,
                    pointer(out),
                    case.in_features,
                    case.out_features,
                    FORMATS[case.dtype],
                    Rows.TOKENS,
                    pointer(scratch) if num_bytes else None,
                ),
            )
            for weight in packed
        ]
    )
    batch = Batch(num_tokens=rows)

    def run(_kept: object = (x, out, scratch)) -> None:
        team.run(operations, batch)

    return run


def torchs(weights: list[Tensor], rows: int) -> Callable[[], object]:
    x = torch.randn(rows, weights[0].shape[1]).to(weights[0].dtype)
    return lambda: [functional.linear(x, weight) for weight in weights]


def measure(team: Team, case: Case, args: argparse.Namespace) -> list[list[str]]:
    """A line of the table for each number of rows."""
    weights = case.weights()
    packed = [team.pack(weight, case.dtype) for weight in weights]
    num_bytes = sum(weight.shape[0] for weight in packed)
    lines = []
    for rows in args.rows:
        took_s = fastest_s(ours(team, case, packed, rows), args.seconds)
        torch_s = fastest_s(torchs(weights, rows), args.seconds)
        lines.append(
            [
                f"{case.out_features} × {case.in_features}",
                str(case.dtype).removeprefix("torch."),
                str(rows),
                f"{case.flops_per_row * rows / took_s / 1e9:.0f}",
                f"{num_bytes / took_s / 1e9:.1f}",
                f"{1e6 * took_s / case.copies:.0f}",
                f"{torch_s / took_s:.2f}",
            ]
        )
    return lines


def cases(args: argparse.Namespace) -> list[Case]:
    found = []
    for shape in args.shapes.split(","):
        out_features, in_features = map(int, shape.split("x"))
        for name in args.formats.split(","):
            dtype = FORMAT_NAMES[name]
            copies = -(-COLD_BYTES // (out_features * in_features * dtype.itemsize))
            found.append(Case(out_features, in_features, dtype, 1 if args.hot else copies))
    return found


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=SHAPES, help="out × in features: 960x576,…")
    parser.add_argument(
        "--formats", default="float32,bfloat16,float16", help=f"of {', '.join(FORMAT_NAMES)}"
    )
    parser.add_argument(
        "--rows", default="1,8,32,128", type=lambda text: [int(part) for part in text.split(",")]
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--level", choices=levels(), default=levels()[0])
    parser.add_argument("--hot", action="store_true", help="one copy, which caches may hold")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each figure")
    return parser.parse_args()


def main() -> None:
    args = read_arguments()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    team = Team(args.threads, args.level)
    print(header(seed=0), f"\nlevel {args.level}, {args.threads} threads")
    lines = [line for case in cases(args) for line in measure(team, case, args)]
    columns = ["out × in", "weights", "rows", "GFLOP/s", "GB/s", "µs", "times torch's speed"]
    print(table([columns, *lines]))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
