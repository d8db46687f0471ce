"""`stoker doctor`: what may be wrong with this host, or with the nodes of a Ray cluster."""

import argparse
import sys
from pathlib import Path

import msgspec

from cluster.config import has_gpu, load_config
from cluster.doctor.checks import examine, table
from cluster.doctor.examination import examine_here, examine_nodes
from cluster.errors import ModelError
from cluster.models import DEFAULT_MODEL, SMOLLM2_FOLDER, resolve_model
from stoker.cli import EXIT_FAILED, EXIT_OK


def doctor(arguments: argparse.Namespace) -> int:
    """Print one line per check; fails if a check does."""
    config = load_config(arguments)
    device = config.device
    if device == "auto":
        device = "cuda" if has_gpu() else "cpu"
    model_dir = find_model(config.model, Path(config.models_dir))
    collect = examine_nodes if config.ray_address else examine_here
    scene = collect(config, model_dir, device=device)
    findings = examine(scene)
    if arguments.json:
        print(msgspec.json.encode(findings).decode())
    else:
        print(table(findings))
    failed = [finding for finding in findings if finding.level == "fail"]
    if failed:
        print(f"stoker: {len(failed)} of {len(findings)} findings are failures", file=sys.stderr)
    return EXIT_FAILED if failed else EXIT_OK


def find_model(model: str | None, models_dir: Path) -> Path | None:
    """The folder of the model, if it is here: nothing is fetched for an examination.

    Raises:
        ModelError: it was named, and is neither here nor something that can be fetched.
    """
    named = model or DEFAULT_MODEL
    if named == DEFAULT_MODEL:
        folder = models_dir / SMOLLM2_FOLDER
        return folder if folder.is_dir() or model is not None else None
    path = Path(named).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelError(f"there is no file {path}")
        return None  # converted at the first start, on each node
    if path.is_dir():
        return path
    return resolve_model(model, models_dir)
