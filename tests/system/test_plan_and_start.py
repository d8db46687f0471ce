"""What `stoker plan` foretells, held against what the start-up log says.

Others use this machine's memory as well, and change their mind between a plan and a start. So the
plan is told what would have been free without the cluster: what its ranks found, and what the
processes of the cluster take.
"""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from bench.peers.weights import large_model
from tests.worker.tiny_models import save_model

WITHIN = 0.02
LAYOUTS = [(tp, pp) for tp in (1, 2, 3) for pp in (1, 2)]
EXACT = ("weight_bytes", "block_bytes")
CLOSE = ("activation_bytes", "free_bytes", "num_blocks")
HEAP_BYTES = 4 << 20
"""By which a step's memory may be off beside that: what the heap grew by on its own account."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What a start says of itself."""

    ranks: list[dict[str, int]]
    num_blocks: int
    own_bytes: int
    """Memory of its own that all of its processes take."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, folder = save_model("llama", tmp_path_factory.mktemp("tiny"))
    return folder


@pytest.fixture(scope="module")
def tinyllama(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[Path]:
    """Random weights of TinyLlama-1.1B's shape."""
    folder = large_model(tmp_path_factory.mktemp("large"))
    yield folder
    (folder / "model.safetensors").unlink()


def start(model: Path, options: list[str]) -> Started:
    """Bring a cluster up, read its log, and end it."""
    command = [sys.executable, "-m", "stoker.cli", "serve", str(model), *options]
    ranks: dict[int, dict[str, int]] = {}
    num_blocks = own_bytes = 0
    with subprocess.Popen(
        [*command, "--backend=local", "--port=0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            fields = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)\b", line)}
            if " weight_bytes=" in line:
                ranks[fields["rank"]] = fields
            elif " worker_ready " in line:
                num_blocks = fields["num_blocks"]
            elif " cluster_ready " in line:
                first = psutil.Process(process.pid)
                family = [first, *first.children(recursive=True)]
                own_bytes = sum(held_bytes(each.pid) for each in family)
                process.send_signal(signal.SIGTERM)
    assert process.returncode == 0
    return Started(
        ranks=[ranks[rank] for rank in sorted(ranks)], num_blocks=num_blocks, own_bytes=own_bytes
    )


def held_bytes(pid: int) -> int:
    """Of pages that no file backs, which the kernel cannot drop when memory is short: its own, and
    its share of those that several have."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    fields = dict(re.findall(r"^(\w+): +(\d+) kB", rollup, re.MULTILINE))
    return (int(fields["Anonymous"]) + int(fields["Pss_Shmem"])) << 10


def compare(model: Path, tp: int, pp: int) -> None:
    options = [f"--tensor-parallel-size={tp}", f"--pipeline-parallel-size={pp}"]
    found = start(model, options)
    assert len(found.ranks) == tp * pp
    least = min(found.ranks, key=lambda rank: rank["num_blocks"])
    free_gib = (least["free_bytes"] + found.own_bytes) / 2**30
    command = [sys.executable, "-m", "stoker.cli", "plan", str(model), *options]
    done = subprocess.run(
        [*command, f"--host-memory-gib={free_gib}", "--json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60.0,
    )
    plan = json.loads(done.stdout)["chosen"]

    assert found.num_blocks == pytest.approx(plan["num_blocks"], rel=WITHIN)
    for foretold, rank in zip(plan["ranks"], found.ranks, strict=True):
        assert [rank[name] for name in EXACT] == [foretold[name] for name in EXACT]
    foretold = plan["ranks"][found.ranks.index(least)]
    for name in CLOSE:
        heap = HEAP_BYTES if name == "activation_bytes" else 0
        assert least[name] == pytest.approx(foretold[name], rel=WITHIN, abs=heap), name


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_a_plan_and_a_start_of_a_small_model_agree(tiny: Path, tp: int, pp: int) -> None:
    compare(tiny, tp, pp)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
def test_a_plan_and_a_start_of_the_135m_model_agree(smollm2: Path, tp: int, pp: int) -> None:
    compare(smollm2, tp, pp)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
def test_a_plan_and_a_start_of_tinyllamas_shape_agree(tinyllama: Path, tp: int, pp: int) -> None:
    compare(tinyllama, tp, pp)
