"""`stoker serve` whose workers are `scripted_worker` processes: `... FOLDER [options]`."""

import sys
from functools import partial
from pathlib import Path

from cluster.supervisor_main import run_cluster
from stoker.cli import make_parser
from stoker.serve_command import serve
from tests.cluster.frontend.tiny_tokenizers import llama3_like
from tests.cluster.scripted_cluster import make_backend, make_plan


def write_model(folder: Path) -> Path:
    """What the engine reads of a model, and nothing else."""
    files = llama3_like()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    (folder / "tokenizer.json").write_bytes(files.tokenizer_json)
    (folder / "tokenizer_config.json").write_bytes(files.config_json)
    (folder / "chat_template.jinja").write_text(files.chat_templates["default"])
    return folder


if __name__ == "__main__":
    run = partial(run_cluster, make_plan=make_plan, make_backend=make_backend)
    sys.exit(serve(make_parser().parse_args(["serve", *sys.argv[1:]]), run))
