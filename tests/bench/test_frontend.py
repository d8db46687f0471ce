"""What one front-end process carries: guarded well below what it does, for noisy machines."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.frontend import HEAD
from bench.report import ROOT

MOST_CPU_MS = 150
"""Per 1,000 tokens; a quiet machine needs a fifth of it."""


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_128_streams_cost_little_cpu_and_never_hold_up_the_engine(
    smollm2: Path, route: str
) -> None:
    """Case 132: tokens pile up in a front end that spends too much on each."""
    streams, num_tokens, rate = 128, 200, 40

    run = subprocess.run(
        [
            *(sys.executable, "-m", "bench.frontend", "--tokenizer", str(smollm2)),
            *("--streams", str(streams), "--tokens", str(num_tokens), "--rates", str(rate)),
            *("--route", route),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )

    row = [cell.strip() for cell in run.stdout.splitlines()[-1].strip("| ").split("|")]
    figures = dict(zip(HEAD, row, strict=True))
    assert float(figures["CPU ms per 1,000"]) < MOST_CPU_MS, run.stdout
    # Every token that was made was taken, and nobody was cut off.
    said = re.search(r"engine: .*tokens (\d+) aborted (\d+) cut (\d+)", run.stderr)
    assert said is not None, run.stderr
    assert said.groups() == (str(streams * (num_tokens + 20)), "0", "0")
